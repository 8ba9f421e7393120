"""The two exchanges on plain tensors: pack, send, and see what was received. No autograd here.

Each direction is a `start_...` that sends and a `finish_...` that waits and returns the results, so
that a caller may compute in between.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from ulysses_comm.collective import start_all_to_all
from ulysses_comm.copies import copy_head_shards, copy_head_shards_torch
from ulysses_comm.layout import summing_dtype
from ulysses_comm.route import Buffers, Route
from ulysses_comm.symmetric.choice import state_of
from ulysses_comm.symmetric.moves import Direction, Exchange
from ulysses_comm.symmetric.pull import start_pull
from ulysses_comm.symmetric.push import push
from ulysses_comm.tiling import gathered_buffer_of, scattered_buffer_of
from ulysses_comm.wire import Run, Wire

# Bytes of a rank from which on several collectives cost less than one and the copy that it takes:
# measured on gloo, 2 and 4 ranks, where the two break even at about 6 MiB.
APART_BYTES = 8 << 20


class Work(Protocol):
    """What is under way, such as a `dist.Work`."""

    def wait(self) -> object:
        """Let what comes after this wait for it."""
        ...


@dataclass
class Transfer:
    """An all-to-all under way. Holds both buffers until it is finished.

    Attributes:
        send: What is sent; None where ranks read the inputs as they lie, or a copy of them.
        work: What to wait for; None if nothing.
    """

    wire: Wire
    route: Route
    buffers: Buffers
    send: torch.Tensor | None
    receive: torch.Tensor
    work: Work | None = field(default=None)

    def wait(self) -> torch.Tensor:
        """Wait for the data and return the receive buffer."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        return self.receive


def start_scatter_heads(
    inputs: Sequence[torch.Tensor],
    wire: Wire,
    route: Route,
    buffers: Buffers,
    *,
    in_place: bool = True,
    async_op: bool = False,
) -> Transfer:
    """Send every rank its heads of this rank's tokens.

    Args:
        inputs: Each (tokens, num_heads, head_dim), or head shards (tokens, world_size, heads per
            rank, head_dim) where the wire is even.
        wire: The layout.
        route: The ranks and their tokens.
        buffers: Where to find memory.
        in_place: Whether head shards that tile a send buffer may be sent as they lie.
        async_op: Return before the data has arrived.
    """
    transfer = _start_symmetric("heads", inputs, wire, route, buffers, async_op=async_op)
    if transfer is not None:
        return transfer
    device = inputs[0].device
    send = scattered_buffer_of(inputs, wire) if in_place else None
    if send is None:
        send = _pack_scattered(inputs, wire, route, buffers)
        record_copy(route.group, send.nbytes, after=False)
    shape = (route.seqlen, *wire.row_shape(route.rank))
    receive = buffers.take_receive(shape, wire.dtype, device, route.group)
    transfer = Transfer(wire, route, buffers, send, receive)
    transfer.work = _send_scattered(transfer, send, async_op)
    return transfer


def finish_scatter_heads(transfer: Transfer) -> list[torch.Tensor]:
    """Return each input as the view (seqlen, heads of this rank, ·) of the receive buffer."""
    return transfer.wire.gathered(transfer.wait(), transfer.route.rank)


def start_scatter_seqlen(
    inputs: Sequence[torch.Tensor],
    wire: Wire,
    route: Route,
    buffers: Buffers,
    *,
    async_op: bool = False,
) -> Transfer:
    """Send every rank its tokens of this rank's heads.

    Args:
        inputs: Each (seqlen, heads of this rank, head_dim). One contiguous tensor, or views that
            tile one gathered buffer, are sent in place.
        wire: The layout.
        route: The ranks and their tokens.
        buffers: Where to find memory.
        async_op: Return before the data has arrived.
    """
    transfer = _start_symmetric("seqlen", inputs, wire, route, buffers, async_op=async_op)
    if transfer is not None:
        return transfer
    device = inputs[0].device
    send = gathered_buffer_of(inputs, wire, route.rank)
    if send is None:
        shape = (route.seqlen, *wire.row_shape(route.rank))
        send = buffers.take(shape, wire.dtype, device, route.group)
        _zero_gaps(send, wire, route.rank)
        for view, tensor in zip(wire.gathered(send, route.rank), inputs, strict=True):
            copy_head_shards([view.unsqueeze(1)], [tensor.unsqueeze(1)])
        record_copy(route.group, send.nbytes, after=False)
    shape = wire.scattered_shape(route.tokens)
    receive = buffers.take_receive(shape, wire.dtype, device, route.group)
    transfer = Transfer(wire, route, buffers, send, receive)
    transfer.work = _send_gathered(transfer, send, async_op)
    return transfer


def start_scatter_seqlen_apart(
    inputs: Sequence[torch.Tensor], wire: Wire, route: Route, buffers: Buffers
) -> list[Transfer]:
    """Send like `start_scatter_seqlen`, each input by itself where that is cheaper.

    Tensors that lie apart, as gradients do, share a collective only after a copy that brings them
    together. By themselves they are sent as they lie, and one is assembled while the next travels.
    Which it is depends on nothing but what all ranks know.
    """
    if not _go_apart(wire, route, inputs[0].device):
        return [start_scatter_seqlen(inputs, wire, route, buffers)]
    return [
        start_scatter_seqlen([tensor], wire.of_inputs([index]), route, buffers, async_op=True)
        for index, tensor in enumerate(inputs)
    ]


def finish_scatter_seqlen_apart(
    transfers: Sequence[Transfer], as_shards: Sequence[bool]
) -> list[torch.Tensor]:
    """Return what `finish_scatter_seqlen` would have, for transfers that may be several."""
    forms = iter(as_shards)
    results = []
    for transfer in transfers:
        own_forms = list(itertools.islice(forms, len(transfer.wire.splits)))
        results.extend(finish_scatter_seqlen(transfer, own_forms))
    return results


def finish_scatter_seqlen(transfer: Transfer, as_shards: Sequence[bool]) -> list[torch.Tensor]:
    """Return each input with all heads of this rank's tokens.

    Args:
        transfer: What `start_scatter_seqlen` returned.
        as_shards: For each input, whether to return the view (tokens, world_size, heads per rank,
            head_dim), which needs an even split, or (tokens, num_heads, head_dim). Heads that
            several ranks own are summed over them.
    """
    receive, wire = transfer.wait(), transfer.wire
    results = []
    for index, shards in enumerate(as_shards):
        parts = wire.scattered(receive, transfer.route.tokens, index)
        if shards:
            results.append(parts[0][1])
        else:
            results.append(_flatten(parts, transfer, index))
    return results


def record_copy(group: dist.ProcessGroup, nbytes: int, *, after: bool) -> None:
    """Tell a group that keeps a record (a simulated one) of bytes copied around its collective."""
    record = getattr(group, "record_copied_bytes", None)
    if record is not None and nbytes:
        record(nbytes, after=after)


def _start_symmetric(
    direction: Direction,
    inputs: Sequence[torch.Tensor],
    wire: Wire,
    route: Route,
    buffers: Buffers,
    *,
    async_op: bool,
) -> Transfer | None:
    """Exchange through symmetric memory if the group does; None leaves it to the collective."""
    state = state_of(route.group)
    if state is None or not state.serves(inputs):
        return None
    exchange = Exchange(direction, wire, route.split_sizes)

    def own() -> torch.Tensor:
        shape = exchange.receive_shape(route.rank)
        return buffers.take_receive(shape, wire.dtype, inputs[0].device, route.group)

    if async_op:
        receive, work = start_pull(state, exchange, inputs, own)
        return Transfer(wire, route, buffers, None, receive, work)
    receive = push(state, exchange, inputs, own, lend=buffers.receive is None)
    return Transfer(wire, route, buffers, None, receive)


def _pack_scattered(
    inputs: Sequence[torch.Tensor], wire: Wire, route: Route, buffers: Buffers
) -> torch.Tensor:
    shape = wire.scattered_shape(route.tokens)
    send = buffers.take(shape, wire.dtype, inputs[0].device, route.group)
    if not wire.is_uniform:  # heads of one dtype and size lie without gaps
        for rank in range(wire.world_size):
            _zero_gaps(wire.block(send, route.tokens, rank), wire, rank)
    destinations: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for index, tensor in enumerate(inputs):
        for run, view in wire.scattered(send, route.tokens, index):
            destinations.append(view)
            sources.append(tensor if tensor.dim() == 4 else run.of_heads(tensor))
    _copy_by_shape(destinations, sources)
    return send


def _copy_by_shape(destinations: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy all pairs; on a GPU those over equally many ranks in one launch."""
    if destinations and destinations[0].device.type == "cpu":
        copy_head_shards_torch(destinations, sources)
        return
    for count in dict.fromkeys(view.shape[1] for view in destinations):
        chosen = [i for i, view in enumerate(destinations) if view.shape[1] == count]
        copy_head_shards([destinations[i] for i in chosen], [sources[i] for i in chosen])


def _zero_gaps(rows: torch.Tensor, wire: Wire, rank: int) -> None:
    """Clear what alignment leaves unused, so that equal inputs send equal bytes."""
    for start, stop in wire.gaps(rank):
        rows[..., start:stop].zero_()


def _go_apart(wire: Wire, route: Route, device: torch.device) -> bool:
    """Whether a collective for each input costs less than copying them into one send buffer."""
    # Not on GPUs: there the copy is one launch at memory speed, less than further collectives.
    if device.type != "cpu" or len(wire.splits) == 1:
        return False
    return route.seqlen * max(wire.row_sizes) * wire.dtype.itemsize >= APART_BYTES


def _flatten(parts: list[tuple[Run, torch.Tensor]], transfer: Transfer, index: int) -> torch.Tensor:
    """Assemble (tokens, num_heads, head_dim) from what each run of ranks sent."""
    wire, route, buffers = transfer.wire, transfer.route, transfer.buffers
    split = wire.splits[index]
    shape = (route.tokens, split.num_heads, wire.head_dims[index])
    flat = None if buffers.results is None else buffers.results[index]
    if split.overlaps:
        total = sum_shares(parts, shape, wire.dtypes[index])
        return total if flat is None else flat.copy_(total)
    if flat is None and len(parts) == 1 and flattens_as_view(parts[0][1]):
        return parts[0][1].flatten(1, 2)
    if flat is None:
        flat = buffers.take(shape, wire.dtypes[index], transfer.receive.device, route.group)
    for run, view in parts:
        _copy_by_shape([run.of_heads(flat)], [view])
    record_copy(route.group, flat.nbytes, after=True)
    return flat


def sum_shares(
    parts: list[tuple[Run, torch.Tensor]], shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Add up the shares of heads that several ranks own, in rank order, rounded once."""
    wide = summing_dtype(dtype)
    total = torch.zeros(shape, dtype=wide, device=parts[0][1].device)
    for run, view in parts:
        for place in range(run.num_ranks):
            first = run.first_head + place * run.head_step
            total[:, first : first + run.num_heads] += view[:, place].to(wide)
    return total.to(dtype)


def flattens_as_view(view: torch.Tensor) -> bool:
    """Whether (tokens, ranks, heads, head_dim) flattens to three dimensions without a copy."""
    return (
        view.numel() == 0
        or view.shape[1] == 1
        or view.shape[2] == 1
        or view.stride(1) == view.shape[2] * view.stride(2)
    )


def _send_scattered(transfer: Transfer, send: torch.Tensor, async_op: bool) -> dist.Work | None:
    """All-to-all from scattered to gathered."""
    wire, route = transfer.wire, transfer.route
    if wire.rows_are_alike:
        # Counted in tokens: every rank gets this rank's, this rank gets everyone's.
        return start_all_to_all(
            transfer.receive,
            send.flatten(0, 1),
            list(route.split_sizes),
            [route.tokens] * wire.world_size,
            route.group,
            async_op=async_op,
        )
    own_row = wire.row_sizes[route.rank]
    return start_all_to_all(
        transfer.receive.view(-1),
        send,
        [size * own_row for size in route.split_sizes],
        [route.tokens * row for row in wire.row_sizes],
        route.group,
        async_op=async_op,
    )


def _send_gathered(transfer: Transfer, send: torch.Tensor, async_op: bool) -> dist.Work | None:
    """All-to-all from gathered to scattered."""
    wire, route = transfer.wire, transfer.route
    if wire.rows_are_alike:
        return start_all_to_all(
            transfer.receive.flatten(0, 1),
            send,
            [route.tokens] * wire.world_size,
            list(route.split_sizes),
            route.group,
            async_op=async_op,
        )
    own_row = wire.row_sizes[route.rank]
    return start_all_to_all(
        transfer.receive,
        send.view(-1),
        [route.tokens * row for row in wire.row_sizes],
        [size * own_row for size in route.split_sizes],
        route.group,
        async_op=async_op,
    )
