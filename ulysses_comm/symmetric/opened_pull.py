"""An asynchronous exchange whose send buffer kernels of the user's have written themselves."""

from __future__ import annotations

import torch

from ulysses_comm.symmetric.memory import Block
from ulysses_comm.symmetric.moves import Exchange, agreed
from ulysses_comm.symmetric.opened import note_dropped
from ulysses_comm.symmetric.pull import PullWork, fetch, tell_packed
from ulysses_comm.symmetric.state import RING, GroupState


class OpenedPull:
    """A send buffer of the ring, and a receive buffer, that a kernel may store to before `start`.

    To the peers it is the exchange that `start_pull` starts; some may do the one and some the
    other. Its turn in the ring is taken when it is opened.

    Attributes:
        received: This rank's receive buffer, as the wire sees it; ordinary memory.
        addresses: (world_size,) int64, on the device: where this rank's rows for each rank begin,
            in the send buffer, and for itself in `received`. Written by the opening launch.
    """

    def __init__(self, state: GroupState, exchange: Exchange) -> None:
        """Open an exchange that scatters heads, of rows that are alike on all ranks.

        The current stream waits until all ranks have read out the buffer's last use.

        Args:
            state: Of the group.
            exchange: What is exchanged, some bytes at least.
        """
        facts, rank = agreed(exchange), state.rank
        assert exchange.direction == "heads"
        assert exchange.wire.rows_are_alike
        with state.lock, state.on_device():
            state.check_room()
            number = state.started
            self._ring = number % RING
            self._block = state.send_buffers(facts.send_bytes)[self._ring]
            # Before the launch: a rank that runs out of memory has not taken part then.
            shape, dtype = exchange.receive_shape(rank), exchange.wire.dtype
            self.received = torch.empty(shape, dtype=dtype, device=state.device)
            self.addresses = torch.empty(state.world_size, dtype=torch.int64, device=state.device)
            self._state, self._exchange, self._number = state, exchange, number
            self._open(self._block)
            state.started += 1
            state.unstarted.append(number)

    def _open(self, block: Block) -> None:
        from ulysses_comm.kernels.signals import open_send_kernel

        state, exchange, rank = self._state, self._exchange, self._state.rank
        # The kernel reads words that the side stream has written by then.
        state.await_use(self._ring)
        open_send_kernel[(1,)](
            state.pad, state.words, state.report.words, self.addresses, block.addresses[rank],
            exchange.block_bytes(rank, rank),  # all blocks are as large: rows are alike
            self.received.data_ptr() + exchange.receive_offset(rank, rank), rank, self._ring,
            state.timeout_ns, WORLD=state.world_size, RING=RING,
            ON_GPU=state.device.type == "cuda", num_warps=1,
        )  # fmt: skip

    def start(self) -> PullWork:
        """Start the exchange; follows, in the order of streams, what stored to the addresses.

        Returns:
            What to wait for before `received` is read.

        Raises:
            RuntimeError: If one that was opened before is not started yet, or the group has failed.
        """
        state = self._state
        state.check()
        with state.lock, state.on_device():
            if state.unstarted[0] != self._number:
                raise RuntimeError(
                    "start() on a target while another that was opened before it is not started: "
                    "expected start() in the order in which they were opened, the same on all "
                    "ranks."
                )
            work = self._launch()
            state.unstarted.pop(0)
            return work

    def _launch(self) -> PullWork:
        state = self._state
        if state.side is None:
            self._exchange_rows()
            return PullWork(None, None, ())
        stream = torch.cuda.current_stream(state.device)
        state.side.wait_stream(stream)
        with torch.cuda.stream(state.side):
            self._exchange_rows()
            event = state.note_use(self._ring)
        # Should the caller drop it before it has waited.
        self.received.record_stream(state.side)
        return PullWork(event, stream, ())

    def _exchange_rows(self) -> None:
        tell_packed(self._state, self._exchange, self._ring)
        fetch(self._state, self._exchange, self.received, self._block, self._ring)

    def abandon(self) -> None:
        """Say that this exchange will not be started; the group's next one raises."""
        note_dropped(self._state, "start()")
