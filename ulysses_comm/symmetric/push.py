"""The synchronous exchange: one launch stores everything into the receive slots of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ulysses_comm.symmetric.capture import capture_of, wait_for
from ulysses_comm.symmetric.moves import Exchange, agreed, layout_of
from ulysses_comm.symmetric.pool import Pool, Slot
from ulysses_comm.symmetric.state import MAX_INPUTS, GroupState, Plan
from ulysses_comm.wire import Wire


def push(
    state: GroupState,
    exchange: Exchange,
    inputs: Sequence[torch.Tensor],
    own: Callable[[], torch.Tensor],
    *,
    lend: bool,
) -> torch.Tensor:
    """Exchange, and return this rank's receive buffer.

    Args:
        state: Of the group.
        exchange: What is exchanged; the same on all ranks.
        inputs: As for `start_scatter_heads` or `start_scatter_seqlen`.
        own: Returns an ordinary receive buffer, for results that are not lent.
        lend: Whether the result may lie in a slot, if one is free.

    Returns:
        The buffer, filled once the current stream gets there. If it is lent, no later exchange
        writes to it for as long as anything refers to it.
    """
    facts = agreed(exchange)
    if facts.receive_bytes == 0:
        return own()
    state.check_turn()
    with state.lock, state.on_device():
        pool, place = take_place(state, facts.receive_bytes, lend=lend)
        # Before the launch: a rank that runs out of memory has not taken part then.
        result = own() if place is pool.staging else None
        _launch(state, exchange, inputs, pool, place, facts.digest)
        received = place.lend(exchange.receive_shape(state.rank), exchange.wire.dtype)
        clear_gaps(received, exchange, state.rank)
        return received if result is None else result.copy_(received)


def take_place(state: GroupState, nbytes: int, *, lend: bool) -> tuple[Pool, Slot]:
    """Return where this rank receives: a slot that may be lent, or the pool's staging slot.

    The current stream has been made to wait for the group's launches, and for the place's last use.
    """
    pool = state.pool(nbytes)
    slot = pool.take(capture_of(state.device)) if lend and state.slots else None
    place = pool.staging if slot is None else slot
    stream = state.enter()
    if stream is not None:
        wait_for(stream, place.stream)  # where its last result was lent, and may be read
        place.stream = stream
    return pool, place


def movable(inputs: Sequence[torch.Tensor], wire: Wire) -> list[torch.Tensor]:
    """Return inputs as the kernels read them: of the wire's dtype, heads of adjacent channels."""
    ready = []
    for tensor, dtype in zip(inputs, wire.dtypes, strict=True):
        if tensor.dtype != dtype:
            tensor = tensor.to(dtype)
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        if tensor.numel() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            tensor = tensor.contiguous()
        ready.append(tensor)
    return ready


def addresses(inputs: Sequence[torch.Tensor], unused: int) -> list[int]:
    """Return where inputs begin, as many as the kernels take; `unused` where nothing is read."""
    found = [tensor.data_ptr() or unused for tensor in inputs]
    return found + [unused] * (MAX_INPUTS - len(found))


def shape_constants(state: GroupState, plan: Plan, count: int) -> dict[str, int]:
    """Return what the kernels are compiled for."""
    cut = plan.cut
    return {
        "WORLD": state.world_size,
        "INPUTS": count,
        "WORD": cut.word,
        "VEC": cut.vec,
        "ROWS": cut.rows,
        "PIECE": cut.piece,
    }


def grid_of(state: GroupState, plan: Plan) -> tuple[int]:
    """Return how many programs take the tiles in turn; a multiple of the ranks."""
    return (max(state.world_size, min(plan.cut.total, state.programs)),)


def clear_gaps(receive: torch.Tensor, exchange: Exchange, rank: int) -> None:
    """Clear what alignment leaves unused in rows of bytes, as the collective receives it."""
    wire = exchange.wire
    if wire.is_uniform:
        return
    blocks = [(rank, receive)]
    if exchange.direction == "seqlen":
        tokens = exchange.split_sizes[rank]
        blocks = [(s, wire.block(receive, tokens, s)) for s in range(exchange.world_size)]
    for owner, rows in blocks:
        for start, stop in wire.gaps(owner):
            rows[..., start:stop].zero_()


def _launch(
    state: GroupState,
    exchange: Exchange,
    inputs: Sequence[torch.Tensor],
    pool: Pool,
    place: Slot,
    digest: int,
) -> None:
    from ulysses_comm.kernels.push import push_kernel

    ready = movable(inputs, exchange.wire)
    plan = state.plan(exchange, tuple(map(layout_of, ready)), pack=False)
    push_kernel[grid_of(state, plan)](
        *addresses(ready, state.pad.data_ptr()),
        plan.table,
        pool.bases,
        state.pads,
        state.pad,
        state.words,
        state.report.words,
        plan.cut.columns,
        plan.cut.total,
        state.rank,
        place.index,
        digest,
        state.timeout_ns,
        **shape_constants(state, plan, len(ready)),
        ON_GPU=state.device.type == "cuda",
        num_warps=state.tuning.warps,
    )
