"""Exchanges of several dtypes or head dims at once, as registered operators.

Bytes have no gradient, so the operators take and return the tensors themselves, and the bytes are
their inner affair. Each one's backward is the other.

No `from __future__ import annotations` here: `torch.library.custom_op` reads the annotations.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ulysses_comm.collective import group_of_graph, keep_in_order
from ulysses_comm.head_split import HeadSplit
from ulysses_comm.layout import shares_memory
from ulysses_comm.transfer import (
    Buffers,
    Route,
    Transfer,
    finish_scatter_heads,
    finish_scatter_seqlen,
    record_copy,
    start_scatter_heads,
    start_scatter_seqlen,
)
from ulysses_comm.wire import Wire, plan_wire


def scatter_heads_bytes(
    inputs: Sequence[torch.Tensor], wire: Wire, route: Route
) -> list[torch.Tensor]:
    """Trade (tokens, num_heads, head_dim) of each input for (seqlen, heads of this rank, ·)."""
    results: list[torch.Tensor] = torch.ops.ulysses_comm.scatter_heads_bytes(
        list(inputs),
        _flat_ranges(wire),
        list(route.split_sizes),
        route.group.group_name,
        route.rank,
    )
    return results


def scatter_seqlen_bytes(
    inputs: Sequence[torch.Tensor], wire: Wire, route: Route
) -> list[torch.Tensor]:
    """Trade (seqlen, heads of this rank, head_dim) of each input for (tokens, num_heads, ·)."""
    results: list[torch.Tensor] = torch.ops.ulysses_comm.scatter_seqlen_bytes(
        list(inputs),
        _flat_ranges(wire),
        list(route.split_sizes),
        route.group.group_name,
        route.rank,
    )
    return results


def _flat_ranges(wire: Wire) -> list[int]:
    """Return start and stop of every rank of every input, in one list: operators take no nested."""
    return [bound for split in wire.splits for heads in split.ranges for bound in heads]


def _splits_of(head_ranges: Sequence[int], count: int) -> list[HeadSplit]:
    """Undo `_flat_ranges`."""
    bounds = list(head_ranges)
    size = len(bounds) // count
    splits = []
    for first in range(0, len(bounds), size):
        own = bounds[first : first + size]
        splits.append(HeadSplit(max(own), tuple(zip(own[::2], own[1::2], strict=True))))
    return splits


def _apart(results: list[torch.Tensor], transfer: Transfer) -> list[torch.Tensor]:
    """Copy results that lie in the receive buffer: an operator's results share no memory."""
    apart = []
    for result in results:
        if shares_memory(result, transfer.receive):
            result = result.clone(memory_format=torch.contiguous_format)
            record_copy(transfer.route.group, result.nbytes, after=True)
        apart.append(result)
    return apart


def _plan(inputs: Sequence[torch.Tensor], head_ranges: Sequence[int]) -> Wire:
    return plan_wire(
        tuple(tensor.dtype for tensor in inputs),
        tuple(tensor.shape[-1] for tensor in inputs),
        tuple(_splits_of(head_ranges, len(inputs))),
    )


@torch.library.custom_op("ulysses_comm::scatter_heads_bytes", mutates_args=())
def _scatter_heads(
    inputs: Sequence[torch.Tensor],
    head_ranges: Sequence[int],
    split_sizes: Sequence[int],
    group_name: str,
    rank: int,
) -> list[torch.Tensor]:
    group = group_of_graph(group_name, rank, len(split_sizes))
    route = Route(group, rank, tuple(split_sizes))
    transfer = start_scatter_heads(inputs, _plan(inputs, head_ranges), route, Buffers())
    return _apart(finish_scatter_heads(transfer), transfer)


@_scatter_heads.register_fake
def _(
    inputs: Sequence[torch.Tensor],
    head_ranges: Sequence[int],
    split_sizes: Sequence[int],
    group_name: str,
    rank: int,
) -> list[torch.Tensor]:
    return [
        tensor.new_empty((sum(split_sizes), split.counts[rank], tensor.shape[-1]))
        for tensor, split in zip(inputs, _splits_of(head_ranges, len(inputs)), strict=True)
    ]


@torch.library.custom_op("ulysses_comm::scatter_seqlen_bytes", mutates_args=())
def _scatter_seqlen(
    inputs: Sequence[torch.Tensor],
    head_ranges: Sequence[int],
    split_sizes: Sequence[int],
    group_name: str,
    rank: int,
) -> list[torch.Tensor]:
    group = group_of_graph(group_name, rank, len(split_sizes))
    route = Route(group, rank, tuple(split_sizes))
    transfer = start_scatter_seqlen(inputs, _plan(inputs, head_ranges), route, Buffers())
    return _apart(finish_scatter_seqlen(transfer, [False] * len(inputs)), transfer)


@_scatter_seqlen.register_fake
def _(
    inputs: Sequence[torch.Tensor],
    head_ranges: Sequence[int],
    split_sizes: Sequence[int],
    group_name: str,
    rank: int,
) -> list[torch.Tensor]:
    return [
        tensor.new_empty((split_sizes[rank], split.num_heads, tensor.shape[-1]))
        for tensor, split in zip(inputs, _splits_of(head_ranges, len(inputs)), strict=True)
    ]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    tensors, ctx.head_ranges, ctx.split_sizes, ctx.group_name, ctx.rank = inputs
    ctx.count = len(tensors)
    ctx.chosen = [i for i, t in enumerate(tensors) if t.is_floating_point() or t.is_complex()]
    ctx.shapes = [result.shape for result in output]
    ctx.set_materialize_grads(False)
    ctx.like = [(t.dtype, t.device) for t in tensors]


def _send_back(
    ctx: Any, grads: Sequence[torch.Tensor | None], operator: Any
) -> tuple[list[torch.Tensor | None], None, None, None, None]:
    """Send the gradients of inputs that can have one the opposite way, in one exchange."""
    sent = []
    for index in ctx.chosen:
        grad, (dtype, device) = grads[index], ctx.like[index]
        if grad is None:
            grad = torch.zeros(ctx.shapes[index], dtype=dtype, device=device)
        sent.append(grad)
    size = len(ctx.head_ranges) // ctx.count
    ranges = [bound for i in ctx.chosen for bound in ctx.head_ranges[i * size : (i + 1) * size]]
    back = operator(sent, ranges, ctx.split_sizes, ctx.group_name, ctx.rank)
    placed: list[torch.Tensor | None] = [None] * ctx.count
    for index, grad in zip(ctx.chosen, back, strict=True):
        placed[index] = grad
    return placed, None, None, None, None


def _scatter_heads_backward(ctx: Any, grads: Any) -> Any:
    return _send_back(ctx, grads, torch.ops.ulysses_comm.scatter_seqlen_bytes)


def _scatter_seqlen_backward(ctx: Any, grads: Any) -> Any:
    return _send_back(ctx, grads, torch.ops.ulysses_comm.scatter_heads_bytes)


_scatter_heads.register_autograd(_scatter_heads_backward, setup_context=_remember)
_scatter_seqlen.register_autograd(_scatter_seqlen_backward, setup_context=_remember)
keep_in_order(_scatter_heads)
keep_in_order(_scatter_seqlen)
