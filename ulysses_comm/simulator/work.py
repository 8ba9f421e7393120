"""Handles of issued calls, as torch.distributed knows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from ulysses_comm.simulator import streams
from ulysses_comm.simulator.errors import SimulationError
from ulysses_comm.simulator.rendezvous import Call, Group, refuse_changes


class Transfer(Protocol):
    """A collective or a message, as far as a handle needs to know it."""

    done: bool
    marks: streams.Marks

    @property
    def title(self) -> str:
        """Name of the call in reports."""

    def describe(self) -> str:
        """Say what is waited for."""


class SimulatedWork(dist.Work):
    """The handle of one rank's part in a collective or message."""

    def __init__(self, group: Group, transfer: Transfer, call: Call) -> None:
        super().__init__()
        self._group = group
        self._transfer = transfer
        self._call = call
        self._rank = group.ranks[call.rank]
        self._delivered = False
        # Until wait(): torch keeps only the C++ half of a handle that a functional collective
        # returned, and an unwaited handle has to be reported.
        group.scheduler.pending[self._rank][id(self)] = self

    def __str__(self) -> str:
        return f"{self._transfer.title}, issued at {self._call.location}"

    def wait(self, timeout: object = None) -> bool:
        """Return once the result is there. The timeout never passes: a deadlock is found at once.

        Raises:
            AsyncMisuseError: If a buffer of the call was written since it was issued.
        """
        if self._delivered:
            return True
        scheduler = self._group.scheduler
        scheduler.require_current(self._rank)
        if self._call.watched:
            with self._group.failing_on_error(self._call):
                refuse_changes(self._call, self._transfer.title, self._rank)
        self._call.waiting = True
        scheduler.block(self._rank, self._transfer)
        self._deliver()
        return True

    def is_completed(self) -> bool:
        """Tell whether the result is there; True has the effect of `wait()`.

        A rank that asks lets the other ranks run on, so that a loop around this comes to an end.
        """
        if self._delivered:
            return True
        scheduler = self._group.scheduler
        scheduler.require_current(self._rank)
        return scheduler.poll(self._rank, self._transfer) and self.wait()

    def is_success(self) -> bool:
        """Tell whether the result has been delivered; failures raise in `wait()`."""
        return self._delivered

    def exception(self) -> None:
        """Return None: failures raise in `wait()`."""

    def synchronize(self) -> None:
        """Do what `wait()` does."""
        self.wait()

    def block_current_stream(self) -> None:
        """Do what `wait()` does."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """Wait, and return the tensors that the call wrote, or passed through."""
        self.wait()
        return self._call.receives or self._call.sends

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Wait, and return a future that holds `result()`.

        A future that is still open could only be waited for inside torch, where no other rank
        would be let on.
        """
        tensors = self.result()
        devices: list[int | str | torch.device] = [
            *{tensor.device: None for tensor in tensors if streams.has_streams(tensor.device)}
        ]
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=devices)
        future.set_result(tensors)
        return future

    def source_rank(self) -> int:
        """Group rank that sent what a `recv` received."""
        source = self._call.extra
        if not isinstance(source, int):
            raise SimulationError(f"{self._transfer.title} has no single source rank")
        return source

    _source_rank = source_rank

    def abandon(self) -> None:
        """Let a handle go whose run is over, torch's own list of open collectives included."""
        self._delivered = True
        for tensor in self._call.receives or self._call.sends:
            torch.ops._c10d_functional.wait_tensor(tensor)

    def _deliver(self) -> None:
        streams.follow(self._transfer.marks)
        self._call.deliver()
        self._call.watched = []
        self._delivered = True
        self._group.scheduler.pending[self._rank].pop(id(self), None)


class BatchWork(dist.Work):
    """The handle of several calls at once."""

    def __init__(self, works: Sequence[SimulatedWork]) -> None:
        super().__init__()
        self._works = list(works)

    def wait(self, timeout: object = None) -> bool:
        """Wait for all of them."""
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        """Tell whether all of them are done."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Tell whether all results have been delivered."""
        return all(work.is_success() for work in self._works)

    def synchronize(self) -> None:
        """Wait for all of them."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """Wait, and return the tensors of all of them."""
        return [tensor for work in self._works for tensor in work.result()]
