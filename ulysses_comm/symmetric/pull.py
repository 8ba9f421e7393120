"""The asynchronous exchange: copy engines fetch each peer's block while other kernels run.

All of it runs on a side stream. The inputs are packed into a send buffer that the peers can read;
then the stream waits for theirs and copies block by block into ordinary memory. Once the pack is
over no multiprocessor is held but by one warp, which waits for signals.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch

from ulysses_comm.symmetric.capture import is_capturing
from ulysses_comm.symmetric.memory import Block
from ulysses_comm.symmetric.moves import Exchange, agreed, layout_of
from ulysses_comm.symmetric.push import (
    addresses,
    clear_gaps,
    grid_of,
    movable,
    shape_constants,
)
from ulysses_comm.symmetric.state import RING, GroupState


class PullWork:
    """An exchange under way; keeps what it reads alive until it has been waited for."""

    def __init__(
        self,
        event: torch.cuda.Event | None,
        stream: torch.cuda.Stream | None,
        inputs: Sequence[torch.Tensor],
    ) -> None:
        """Hold on to an exchange.

        Args:
            event: Comes after the copies; None if there is nothing to wait for.
            stream: Where it was started; inputs and buffers are reused in its order.
            inputs: What the copies read.
        """
        self._event, self._stream, self._inputs = event, stream, inputs
        self._captured = stream is not None and is_capturing(stream)

    def wait(self) -> bool:
        """Let the current stream of the exchange's device wait for the copies.

        The stream where it was started waits as well: in its order an input that was lent is lent
        again, and a workspace's buffer is handed out again.
        """
        if self._event is not None and self._stream is not None:
            current = torch.cuda.current_stream(self._stream.device)
            current.wait_event(self._event)
            if current == self._stream:
                self._event = None
        self._release()
        return True

    def __del__(self) -> None:
        # Dropped without a wait, on any thread: its current stream has nothing to do with this.
        with contextlib.suppress(RuntimeError):
            self._release()

    def _release(self) -> None:
        event, stream = self._event, self._stream
        self._event, self._stream = None, None
        # A capture that began or ended since: CUDA forbids it, and has synchronised.
        if event is not None and stream is not None and is_capturing(stream) == self._captured:
            stream.wait_event(event)
        self._inputs = ()


def start_pull(
    state: GroupState,
    exchange: Exchange,
    inputs: Sequence[torch.Tensor],
    own: Callable[[], torch.Tensor],
) -> tuple[torch.Tensor, PullWork]:
    """Start an exchange into ordinary memory.

    Args:
        state: Of the group.
        exchange: What is exchanged; the same on all ranks.
        inputs: As for `start_scatter_heads` or `start_scatter_seqlen`; not to be written to before
            the work has been waited for.
        own: Returns the receive buffer.

    Returns:
        The receive buffer, and what to wait for before it is read.
    """
    facts = agreed(exchange)
    if facts.send_bytes == 0:
        return own(), PullWork(None, None, ())
    state.check_start()
    with state.lock, state.on_device():
        blocks = state.send_buffers(facts.send_bytes)
        ring = state.started % RING
        receive, ready = own(), movable(inputs, exchange.wire)
        state.started += 1
        if state.side is None:
            _pack(state, exchange, ready, receive, blocks[ring], ring)
            fetch(state, exchange, receive, blocks[ring], ring)
            return receive, PullWork(None, None, ())
        stream = torch.cuda.current_stream(state.device)
        state.side.wait_stream(stream)
        with torch.cuda.stream(state.side):
            _pack(state, exchange, ready, receive, blocks[ring], ring)
            fetch(state, exchange, receive, blocks[ring], ring)
            event = state.note_use(ring)
        # Should the caller drop them before it has waited.
        for tensor in (receive, *ready):
            tensor.record_stream(state.side)
        return receive, PullWork(event, stream, ready)


def _pack(
    state: GroupState,
    exchange: Exchange,
    ready: Sequence[torch.Tensor],
    receive: torch.Tensor,
    block: Block,
    ring: int,
) -> None:
    """Write this rank's send buffer, its own part straight to the receive buffer, and say so."""
    from ulysses_comm.kernels.push import pack_kernel
    from ulysses_comm.kernels.signals import begin_kernel

    layouts = [layout_of(tensor) for tensor in ready]
    # Accesses are as wide as the receive buffer allows, too.
    layouts[0] = layouts[0]._replace(address=layouts[0].address | receive.data_ptr() & 15)
    plan = state.plan(exchange, tuple(layouts), pack=True)
    world, on_gpu = state.world_size, state.device.type == "cuda"
    begin_kernel[(1,)](
        state.pad, state.words, state.report.words, state.rank, ring, state.timeout_ns,
        WORLD=world, RING=RING, ON_GPU=on_gpu, num_warps=1,
    )  # fmt: skip
    pack_kernel[grid_of(state, plan)](
        *addresses(ready, state.pad.data_ptr()),
        plan.table,
        receive.data_ptr() or state.pad.data_ptr(),
        block.addresses[state.rank],
        plan.cut.columns,
        plan.cut.total,
        state.rank,
        **shape_constants(state, plan, len(ready)),
        num_warps=state.tuning.warps,
    )
    tell_packed(state, exchange, ring)


def tell_packed(state: GroupState, exchange: Exchange, ring: int) -> None:
    """Tell the peers that this rank's send buffer is written."""
    from ulysses_comm.kernels.signals import packed_kernel

    packed_kernel[(1,)](
        state.pads, state.words, state.rank, ring, agreed(exchange).digest,
        WORLD=state.world_size, num_warps=1,
    )  # fmt: skip


def fetch(
    state: GroupState, exchange: Exchange, receive: torch.Tensor, block: Block, ring: int
) -> None:
    """Copy every peer's block into its place, and tell them that they may write again."""
    from ulysses_comm.kernels.signals import await_kernel, done_kernel

    world, rank = state.world_size, state.rank
    await_kernel[(1,)](
        state.pad, state.words, state.report.words, rank, ring, agreed(exchange).digest,
        state.timeout_ns, WORLD=world, RING=RING, ON_GPU=state.device.type == "cuda", num_warps=1,
    )  # fmt: skip
    flat = receive.view(-1).view(torch.uint8)
    for step in range(1, world):
        peer = (rank + step) % world
        size = exchange.block_bytes(peer, rank)
        if size:
            to, start = exchange.receive_offset(peer, rank), exchange.send_offset(peer, rank)
            flat[to : to + size].copy_(block.peers[peer][start : start + size], non_blocking=True)
    clear_gaps(receive, exchange, rank)
    done_kernel[(1,)](state.pads, state.words, rank, ring, WORLD=world, RING=RING, num_warps=1)
