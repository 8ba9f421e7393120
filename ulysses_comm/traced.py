"""The exchanges in a form that `torch.compile` follows: torch operators around one registered one.

The compiler fuses the concatenation into what produces the inputs, so a compiled region stores Q, K
and V in send order to begin with; autograd's formulas come with the operators.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from ulysses_comm.collective import all_to_all_rows, is_tracked
from ulysses_comm.transfer import Route
from ulysses_comm.wire import Wire


def scatter_heads_traced(
    inputs: Sequence[torch.Tensor], wire: Wire, route: Route
) -> list[torch.Tensor]:
    """Do what `start_scatter_heads` and `finish_scatter_heads` do, traceably."""
    _refuse_bytes_with_gradient(inputs, wire)
    if not wire.is_uniform:
        return _scatter_heads_bytes(inputs, wire, route)
    if wire.is_even:
        shards = [
            t if t.dim() == 4 else t.unflatten(1, (wire.world_size, split.counts[0]))
            for t, split in zip(inputs, wire.splits, strict=True)
        ]
        send = torch.cat([shard.transpose(0, 1) for shard in shards], dim=2).flatten(0, 1)
        counts = list(route.split_sizes), [route.tokens] * wire.world_size
        received = all_to_all_rows(send, *counts, route.group)
    else:
        blocks = [
            torch.cat(
                [
                    tensor[:, slice(*split.ranges[rank])]
                    for tensor, split in zip(inputs, wire.splits, strict=True)
                ],
                dim=1,
            ).flatten()
            for rank in range(wire.world_size)
        ]
        own_row = wire.row_sizes[route.rank]
        received = all_to_all_rows(
            torch.cat(blocks).to(wire.dtype),
            [size * own_row for size in route.split_sizes],
            [route.tokens * row for row in wire.row_sizes],
            route.group,
        ).view(route.seqlen, *wire.row_shape(route.rank))
    return list(received.split([split.counts[route.rank] for split in wire.splits], dim=1))


def scatter_seqlen_traced(
    inputs: Sequence[torch.Tensor], wire: Wire, route: Route, as_shards: Sequence[bool]
) -> list[torch.Tensor]:
    """Do what `start_scatter_seqlen` and `finish_scatter_seqlen` do, traceably."""
    if not wire.is_uniform:
        return _scatter_seqlen_bytes(inputs, wire, route, as_shards)
    send = inputs[0] if len(inputs) == 1 else torch.cat(list(inputs), dim=1)
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


def _assemble(parts: Sequence[torch.Tensor], wire: Wire, index: int) -> torch.Tensor:
    """Join the ranks' heads; heads that several ranks own are summed in rank order."""
    split = wire.splits[index]
    if not split.overlaps:
        return torch.cat(list(parts), dim=1)
    dtype = wire.dtypes[index]
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    padded = [
        torch.nn.functional.pad(part.to(wide), (0, 0, start, split.num_heads - stop))
        for part, (start, stop) in zip(parts, split.ranges, strict=True)
    ]
    return functools.reduce(torch.add, padded).to(dtype)


def _scatter_heads_bytes(
    inputs: Sequence[torch.Tensor], wire: Wire, route: Route
) -> list[torch.Tensor]:
    """Send rows of bytes; nothing here carries a gradient."""
    blocks = []
    for rank in range(wire.world_size):
        block = inputs[0].new_zeros((route.tokens, wire.row_sizes[rank]), dtype=torch.uint8)
        parts = wire.gathered(block, rank)
        for part, tensor, split in zip(parts, inputs, wire.splits, strict=True):
            part.copy_(tensor[:, slice(*split.ranges[rank])])
        blocks.append(block.flatten())
    own_row = wire.row_sizes[route.rank]
    received = all_to_all_rows(
        torch.cat(blocks),
        [size * own_row for size in route.split_sizes],
        [route.tokens * row for row in wire.row_sizes],
        route.group,
    )
    return wire.gathered(received.view(route.seqlen, own_row), route.rank)


def _scatter_seqlen_bytes(
    inputs: Sequence[torch.Tensor], wire: Wire, route: Route, as_shards: Sequence[bool]
) -> list[torch.Tensor]:
    """Send rows of bytes; nothing here carries a gradient."""
    _refuse_bytes_with_gradient(inputs, wire)
    own_row = wire.row_sizes[route.rank]
    send = inputs[0].new_zeros((route.seqlen, own_row), dtype=torch.uint8)
    for part, tensor in zip(wire.gathered(send, route.rank), inputs, strict=True):
        part.copy_(tensor)
    sizes = [route.tokens * row for row in wire.row_sizes]
    received = all_to_all_rows(
        send.flatten(), sizes, [size * own_row for size in route.split_sizes], route.group
    )
    blocks = [
        wire.gathered(block.view(route.tokens, wire.row_sizes[rank]), rank)
        for rank, block in enumerate(received.split(sizes))
    ]
    parts_of = [[block[index] for block in blocks] for index in range(len(wire.splits))]
    return [
        torch.stack(parts, dim=1) if shards else _assemble(parts, wire, index)
        for index, (parts, shards) in enumerate(zip(parts_of, as_shards, strict=True))
    ]


def _refuse_bytes_with_gradient(inputs: Sequence[torch.Tensor], wire: Wire) -> None:
    if not wire.is_uniform and is_tracked(inputs):
        raise RuntimeError(
            "keep_dtypes=True with several dtypes or head dims carries bytes, through which no "
            "gradient flows under torch.compile, but an input requires grad. Call it outside the "
            "compiled region, use one dtype and head_dim, or one exchange for each."
        )
