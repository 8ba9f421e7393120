"""The exchanges in a form that `torch.compile` follows: torch operators around one collective.

The compiler fuses the concatenation into what produces the inputs, so a compiled region stores Q, K
and V in send order to begin with; autograd's formulas come with the operators. docs/compile.md says
what a user has to know.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from ulysses_comm.byte_rows import (
    SCATTERED,
    container_of,
    elements_per_row,
    pack_rows,
    unpack_rows,
)
from ulysses_comm.collective import WIRE_DTYPES, all_to_all_rows, is_tracked
from ulysses_comm.head_split import HeadSplit
from ulysses_comm.layout import summing_dtype
from ulysses_comm.route import Route
from ulysses_comm.wire import Wire


def scatter_heads_traced(
    inputs: Sequence[torch.Tensor], wire: Wire, route: Route
) -> list[torch.Tensor]:
    """Do what `start_scatter_heads` and `finish_scatter_heads` do, traceably."""
    if _go_as_bytes(inputs, wire):
        return _scatter_heads_bytes(
            [t if t.dim() == 3 else t.flatten(1, 2) for t in inputs], wire, route
        )
    if wire.is_even:
        shards = [
            t if t.dim() == 4 else t.unflatten(1, (wire.world_size, split.counts[0]))
            for t, split in zip(inputs, wire.splits, strict=True)
        ]
        send = torch.cat([shard.transpose(0, 1) for shard in shards], dim=2).flatten(0, 1)
        counts = list(route.split_sizes), [route.tokens] * wire.world_size
        received = all_to_all_rows(send, *counts, route.group)
    else:
        blocks = _blocks_by_rank(inputs, wire)
        own_row = wire.row_sizes[route.rank]
        received = all_to_all_rows(
            torch.cat([block.flatten() for block in blocks]),
            [size * own_row for size in route.split_sizes],
            [route.tokens * row for row in wire.row_sizes],
            route.group,
        ).view(route.seqlen, *wire.row_shape(route.rank))
    return list(received.split([split.counts[route.rank] for split in wire.splits], dim=1))


def scatter_seqlen_traced(
    inputs: Sequence[torch.Tensor], wire: Wire, route: Route, as_shards: Sequence[bool]
) -> list[torch.Tensor]:
    """Do what `start_scatter_seqlen` and `finish_scatter_seqlen` do, traceably."""
    if _go_as_bytes(inputs, wire):
        return [
            flat.unflatten(1, (wire.world_size, split.counts[0])) if shards else flat
            for flat, split, shards in zip(
                _scatter_seqlen_bytes(inputs, wire, route), wire.splits, as_shards, strict=True
            )
        ]
    send = torch.cat(list(inputs), dim=1) if len(inputs) > 1 else inputs[0].to(wire.dtype)
    if wire.is_even:
        received = all_to_all_rows(
            send, [route.tokens] * wire.world_size, list(route.split_sizes), route.group
        ).unflatten(0, (wire.world_size, route.tokens))
        views = received.transpose(0, 1).split([split.counts[0] for split in wire.splits], dim=2)
        return [
            view if shards else view.flatten(1, 2)
            for view, shards in zip(views, as_shards, strict=True)
        ]
    own_row = wire.row_sizes[route.rank]
    sizes = [route.tokens * row for row in wire.row_sizes]
    received = all_to_all_rows(
        send.flatten(), sizes, [size * own_row for size in route.split_sizes], route.group
    )
    blocks = [
        block.view(route.tokens, *wire.row_shape(rank)).split(
            [split.counts[rank] for split in wire.splits], dim=1
        )
        for rank, block in enumerate(received.split(sizes))
    ]
    return [
        _assemble([block[index] for block in blocks], wire, index)
        for index in range(len(wire.splits))
    ]


def _go_as_bytes(inputs: Sequence[torch.Tensor], wire: Wire) -> bool:
    """Whether rows are packed into a dtype that a backend knows, rather than being heads."""
    if wire.is_uniform and wire.dtype in WIRE_DTYPES:
        return False
    if is_tracked(inputs) and not container_of(wire).is_floating_point:
        raise RuntimeError(
            f"Inputs of {[str(t.dtype) for t in inputs]} make rows of an odd number of bytes, "
            "which carry no gradient inside torch.compile, but one requires grad. Exchange them "
            "outside the compiled region, or with an even head_dim."
        )
    return True


def _scatter_heads_bytes(
    inputs: Sequence[torch.Tensor], wire: Wire, route: Route
) -> list[torch.Tensor]:
    sizes = elements_per_row(wire)
    inputs = [tensor.to(dtype) for tensor, dtype in zip(inputs, wire.dtypes, strict=True)]
    received = all_to_all_rows(
        pack_rows(inputs, wire, SCATTERED),
        [tokens * sizes[route.rank] for tokens in route.split_sizes],
        [route.tokens * size for size in sizes],
        route.group,
    )
    return unpack_rows(received, route.seqlen, wire, route.rank)


def _scatter_seqlen_bytes(
    inputs: Sequence[torch.Tensor], wire: Wire, route: Route
) -> list[torch.Tensor]:
    sizes = elements_per_row(wire)
    inputs = [tensor.to(dtype) for tensor, dtype in zip(inputs, wire.dtypes, strict=True)]
    received = all_to_all_rows(
        pack_rows(inputs, wire, route.rank),
        [route.tokens * size for size in sizes],
        [tokens * sizes[route.rank] for tokens in route.split_sizes],
        route.group,
    )
    return unpack_rows(received, route.tokens, wire, SCATTERED)


def _blocks_by_rank(inputs: Sequence[torch.Tensor], wire: Wire) -> list[torch.Tensor]:
    """Return for each rank (tokens, its heads of every input, head_dim), promoted."""
    spread = [
        _SpreadHeads.apply(t, split.ranges) if split.overlaps else t  # type: ignore[no-untyped-call]
        for t, split in zip(inputs, wire.splits, strict=True)
    ]
    starts = [[0, *itertools.accumulate(split.counts)] for split in wire.splits]
    return [
        torch.cat(
            [t[:, start[rank] : start[rank + 1]] for t, start in zip(spread, starts, strict=True)],
            dim=1,
        )
        for rank in range(wire.world_size)
    ]


class _SpreadHeads(torch.autograd.Function):
    """Repeat heads that several ranks own, once for each of them.

    Autograd's own formula would add up their gradients in any order, rounding each time; eager mode
    adds them in rank order and rounds once.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, ranges: tuple[tuple[int, int], ...]
    ) -> torch.Tensor:
        ctx.split = HeadSplit(tensor.shape[1], ranges)
        return torch.cat([tensor[:, start:stop] for start, stop in ranges], dim=1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum_shares(grad.split(list(ctx.split.counts), dim=1), ctx.split, grad.dtype), None


def _assemble(parts: Sequence[torch.Tensor], wire: Wire, index: int) -> torch.Tensor:
    """Join the ranks' heads; heads that several ranks own are summed."""
    split = wire.splits[index]
    if not split.overlaps:
        return torch.cat(list(parts), dim=1)
    return _sum_shares(parts, split, wire.dtypes[index])


def _sum_shares(
    parts: Sequence[torch.Tensor], split: HeadSplit, dtype: torch.dtype
) -> torch.Tensor:
    """Add up the shares of heads that several ranks own, in rank order, rounded once."""
    wide = summing_dtype(dtype)
    padded = [
        torch.nn.functional.pad(part.to(wide), (0, 0, start, split.num_heads - stop))
        for part, (start, stop) in zip(parts, split.ranges, strict=True)
    ]
    return functools.reduce(torch.add, padded, torch.zeros_like(padded[0])).to(dtype)
