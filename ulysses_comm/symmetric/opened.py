"""An exchange in two launches, between which kernels of the user's store into all ranks' slots."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from ulysses_comm.symmetric.moves import Exchange, agreed
from ulysses_comm.symmetric.push import take_place
from ulysses_comm.symmetric.state import GroupState

_log = logging.getLogger("ulysses_comm")


class OpenedExchange:
    """Slots of all ranks that this rank may store to until it closes the exchange.

    To the peers it is the exchange that `push` makes in one launch; some may do the one and some
    the other.

    Attributes:
        received: This rank's receive buffer, as the wire sees it; in the slot.
        addresses: (world_size,) int64, on the device: where this rank's rows begin in each rank's
            slot. Written by the opening launch, and by that of the group's next opened exchange.
    """

    def __init__(self, state: GroupState, exchange: Exchange) -> None:
        """Open an exchange that scatters heads, of rows that are alike on all ranks.

        Args:
            state: Of the group.
            exchange: What is exchanged, some bytes at least.
        """
        from ulysses_comm.kernels.signals import open_kernel

        facts, rank = agreed(exchange), state.rank
        assert exchange.direction == "heads"
        assert exchange.wire.rows_are_alike
        state.check_turn()
        with state.lock, state.on_device():
            pool, place = take_place(state, facts.receive_bytes, lend=True)
            open_kernel[(1,)](
                pool.bases, state.pads, state.pad, state.words, state.report.words, state.targets,
                exchange.receive_offset(rank, rank), rank, place.index, facts.digest,
                state.timeout_ns, WORLD=state.world_size, ON_GPU=state.device.type == "cuda",
                num_warps=1,
            )  # fmt: skip
            state.opened = "open"
            # Held from now on: nobody else is to be lent the slot.
            self.received = place.lend(exchange.receive_shape(rank), exchange.wire.dtype)
        self.addresses = state.targets
        self._state, self._place, self._digest = state, place, facts.digest
        self._is_staged = place is pool.staging

    def close(self, own: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Wait until all ranks' rows are there, and return the receive buffer.

        Args:
            own: Returns an ordinary one, for when all slots were lent.

        Follows, in the order of streams, what stored to the addresses.
        """
        from ulysses_comm.kernels.signals import close_kernel

        state = self._state
        state.check()
        with state.lock, state.on_device():
            # Before the launch: a rank that runs out of memory may call this again.
            result = own() if self._is_staged else None
            stream = state.enter()
            if stream is not None:
                self._place.stream = stream
            close_kernel[(1,)](
                state.pads, state.pad, state.words, state.report.words, state.rank,
                self._place.index, self._digest, state.timeout_ns, WORLD=state.world_size,
                ON_GPU=state.device.type == "cuda", num_warps=1,
            )  # fmt: skip
            state.opened = ""
            return self.received if result is None else result.copy_(self.received)

    def abandon(self) -> None:
        """Say that this exchange will not be closed; the group's next one raises."""
        note_dropped(self._state, "finish()")


def note_dropped(state: GroupState, forgotten: str) -> None:
    """Say that an opened exchange will never be over; the group's next one raises.

    Args:
        state: Of the group.
        forgotten: What should have been called.
    """
    state.opened, state.forgotten = "dropped", forgotten
    _log.error(
        "ulysses_comm: rank %d dropped a HeadScatterTarget without %s. The other ranks "
        "give up once their timeout is over; end the run.",
        state.rank,
        forgotten,
    )
