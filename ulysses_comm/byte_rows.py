"""Rows of several dtypes or head dims for compilers: packed and unpacked by registered operators.

Between the two operators the rows travel as floats that mean nothing, since bytes have no gradient:
backward packs gradients into just such rows, and autograd passes them on unread. Each operator's
backward is the other.

No `from __future__ import annotations` here: `torch.library.custom_op` reads the annotations.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ulysses_comm.head_split import HeadSplit
from ulysses_comm.layout import fixed
from ulysses_comm.transfer import sum_shares
from ulysses_comm.wire import Wire, plan_wire

SCATTERED = -1
"""In place of a rank: rows of this rank's tokens for every rank, not of all tokens for one."""

# What a backend moves as it lies, widest first. Only floats are passed on by autograd.
_CONTAINERS = (torch.float32, torch.bfloat16, torch.uint8)


def pack_rows(inputs: Sequence[torch.Tensor], wire: Wire, rank: int) -> torch.Tensor:
    """Return the rows of the inputs as a flat tensor of `container_of(wire)`.

    Args:
        inputs: Each (tokens, num_heads, head_dim) if rank is `SCATTERED`, else (seqlen, heads of
            the rank, head_dim); any strides.
        wire: The layout.
        rank: Whose rows, or `SCATTERED`.
    """
    rows: torch.Tensor = torch.ops.ulysses_comm.pack_rows(list(inputs), _flat_ranges(wire), rank)
    return rows


def unpack_rows(rows: torch.Tensor, tokens: int, wire: Wire, rank: int) -> list[torch.Tensor]:
    """Return the inputs whose rows they are, as new tensors; heads of several ranks are summed."""
    results: list[torch.Tensor] = torch.ops.ulysses_comm.unpack_rows(
        rows, tokens, _names_of(wire.dtypes), list(wire.head_dims), _flat_ranges(wire), rank
    )
    return results


def container_of(wire: Wire) -> torch.dtype:
    """Return the dtype that rows travel as: the widest of which every row is a whole number."""
    rows = [row * wire.dtype.itemsize for row in wire.row_sizes]
    for dtype in _CONTAINERS[:-1]:
        if all(row % dtype.itemsize == 0 for row in rows):
            return dtype
    return _CONTAINERS[-1]


def elements_per_row(wire: Wire) -> list[int]:
    """Return how many elements of the container the row of each rank has."""
    unit = container_of(wire).itemsize
    return [row * wire.dtype.itemsize // unit for row in wire.row_sizes]


def _flat_ranges(wire: Wire) -> list[int]:
    """Return start and stop of every rank of every input, in one list: operators take no nested."""
    return [bound for split in wire.splits for heads in split.ranges for bound in heads]


def _splits_of(head_ranges: Sequence[int], count: int) -> tuple[HeadSplit, ...]:
    """Undo `_flat_ranges`."""
    bounds = list(head_ranges)
    size = len(bounds) // count
    splits = []
    for first in range(0, len(bounds), size):
        own = bounds[first : first + size]
        splits.append(HeadSplit(max(own), tuple(zip(own[::2], own[1::2], strict=True))))
    return tuple(splits)


def _names_of(dtypes: Sequence[torch.dtype]) -> str:
    return ",".join([str(dtype) for dtype in dtypes])


def _dtypes_of(names: str) -> tuple[torch.dtype, ...]:
    """Undo `_names_of`."""
    return tuple(getattr(torch, name.removeprefix("torch.")) for name in names.split(","))


def _wire_of_inputs(inputs: Sequence[torch.Tensor], head_ranges: Sequence[int]) -> Wire:
    return plan_wire(
        tuple(tensor.dtype for tensor in inputs),
        tuple(fixed(tensor.shape[-1]) for tensor in inputs),
        _splits_of(head_ranges, len(inputs)),
    )


def _wire_of_rows(dtypes: str, head_dims: Sequence[int], head_ranges: Sequence[int]) -> Wire:
    return plan_wire(_dtypes_of(dtypes), tuple(head_dims), _splits_of(head_ranges, len(head_dims)))


@torch.library.custom_op("ulysses_comm::pack_rows", mutates_args=())
def _pack_rows(
    inputs: Sequence[torch.Tensor], head_ranges: Sequence[int], rank: int
) -> torch.Tensor:
    wire, tokens = _wire_of_inputs(inputs, head_ranges), inputs[0].shape[0]
    sizes = wire.row_sizes if rank == SCATTERED else wire.row_sizes[rank : rank + 1]
    buffer = torch.empty(tokens * sum(sizes), dtype=wire.dtype, device=inputs[0].device)
    owners = range(wire.world_size) if rank == SCATTERED else (rank,)
    for rows, size, owner in zip(
        buffer.split([tokens * n for n in sizes]), sizes, owners, strict=True
    ):
        for start, stop in wire.gaps(owner):
            rows.view(tokens, size)[:, start:stop].zero_()
    for index, tensor in enumerate(inputs):
        if rank == SCATTERED:
            for run, view in wire.scattered(buffer, tokens, index):
                view.copy_(run.of_heads(tensor))
        else:
            wire.gathered(buffer.view(tokens, sizes[0]), rank)[index].copy_(tensor)
    return buffer.view(container_of(wire))


@_pack_rows.register_fake
def _(inputs: Sequence[torch.Tensor], head_ranges: Sequence[int], rank: int) -> torch.Tensor:
    wire = _wire_of_inputs(inputs, head_ranges)
    sizes = elements_per_row(wire)
    length = inputs[0].shape[0] * (sum(sizes) if rank == SCATTERED else sizes[rank])
    return inputs[0].new_empty((length,), dtype=container_of(wire))


@torch.library.custom_op("ulysses_comm::unpack_rows", mutates_args=())
def _unpack_rows(
    rows: torch.Tensor,
    tokens: int,
    dtypes: str,
    head_dims: Sequence[int],
    head_ranges: Sequence[int],
    rank: int,
) -> list[torch.Tensor]:
    wire = _wire_of_rows(dtypes, head_dims, head_ranges)
    buffer = rows.contiguous().view(wire.dtype)
    results = []
    for index, split in enumerate(wire.splits):
        if rank != SCATTERED:
            view = wire.gathered(buffer.view(tokens, wire.row_sizes[rank]), rank)[index]
            results.append(view.clone(memory_format=torch.contiguous_format))
            continue
        parts = wire.scattered(buffer, tokens, index)
        shape = (tokens, split.num_heads, head_dims[index])
        if split.overlaps:
            results.append(sum_shares(parts, shape, wire.dtypes[index]))
            continue
        result = torch.empty(shape, dtype=wire.dtypes[index], device=rows.device)
        for run, view in parts:
            run.of_heads(result).copy_(view)
        results.append(result)
    return results


@_unpack_rows.register_fake
def _(
    rows: torch.Tensor,
    tokens: int,
    dtypes: str,
    head_dims: Sequence[int],
    head_ranges: Sequence[int],
    rank: int,
) -> list[torch.Tensor]:
    splits = _splits_of(head_ranges, len(head_dims))
    heads = [s.num_heads if rank == SCATTERED else s.counts[rank] for s in splits]
    return [
        rows.new_empty((tokens, count, head_dim), dtype=dtype)
        for count, head_dim, dtype in zip(heads, head_dims, _dtypes_of(dtypes), strict=True)
    ]


def _remember_packed(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    tensors, ctx.head_ranges, ctx.rank = inputs
    ctx.tokens = tensors[0].shape[0]
    ctx.dtypes = [tensor.dtype for tensor in tensors]
    ctx.head_dims = [fixed(tensor.shape[-1]) for tensor in tensors]


def _unpack_gradients(ctx: Any, grad: torch.Tensor) -> tuple[list[torch.Tensor | None], None, None]:
    grads = torch.ops.ulysses_comm.unpack_rows(
        grad, ctx.tokens, _names_of(ctx.dtypes), ctx.head_dims, ctx.head_ranges, ctx.rank
    )
    placed = [
        grad if dtype.is_floating_point or dtype.is_complex else None
        for grad, dtype in zip(grads, ctx.dtypes, strict=True)
    ]
    return placed, None, None


def _remember_unpacked(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    ctx.head_ranges, ctx.rank = inputs[4], inputs[5]
    ctx.results = [(result.shape, result.dtype, result.device) for result in output]


def _pack_gradients(
    ctx: Any, grads: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, None, None, None, None, None]:
    filled = [
        torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
        for grad, (shape, dtype, device) in zip(grads, ctx.results, strict=True)
    ]
    rows = torch.ops.ulysses_comm.pack_rows(filled, ctx.head_ranges, ctx.rank)
    return rows, None, None, None, None, None


_pack_rows.register_autograd(_unpack_gradients, setup_context=_remember_packed)
_unpack_rows.register_autograd(_pack_gradients, setup_context=_remember_unpacked)
