"""One MPI communicator with operations under way: what waits, how long, and what happens then."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from ulysses_comm.mpi import exit_hook

# Polling with sched_yield is as fast as a blocking wait, and can end. After this many seconds of
# nothing the wait is for a rank that computes, and may leave it the core.
_EAGER_SECONDS = 2.0
_POLLS_PER_NAP = 64
_NAP_SECONDS = 0.0002
_yield_core: Callable[[], object] = getattr(os, "sched_yield", lambda: time.sleep(0))


class Channel:
    """A communicator of one process group, the operations on it, and whether it still works.

    MPI cannot take an operation back: after a timeout it may still write to the buffers, so they
    are kept for the rest of the process, the group refuses further work, and the process, when it
    ends, ends the whole MPI job.
    """

    def __init__(self, communicator: MPI.Intracomm, name: str, timeout: timedelta) -> None:
        self.communicator = communicator
        self.rank, self.size = communicator.rank, communicator.size  # known after it is freed too
        self.name = name
        self.timeout = timeout
        self.failure: str | None = None
        self._pending: dict[int, MPIWork] = {}
        # Without this an MPI error ends the process on the spot.
        communicator.Set_errhandler(MPI.ERRORS_RETURN)
        exit_hook.install()

    def start(
        self,
        operation: str,
        begin: Callable[[], list[MPI.Request]],
        *,
        keep: Sequence[Any],
        results: Sequence[torch.Tensor] = (),
        deliver: Callable[[], None] | None = None,
    ) -> MPIWork:
        """Begin an operation and return its handle.

        Args:
            operation: Its name, for errors.
            begin: Starts the MPI requests.
            keep: What must live until they complete: the tensors whose memory MPI uses.
            results: The tensors that hold the outcome.
            deliver: Run once on completion, before anybody is told.
        """
        self.check(operation)
        for work in list(self._pending.values()):
            work.poll()
        try:
            requests = begin()
        except MPI.Exception as error:
            exit_hook.mark_failed(keep)  # some of the requests may be under way
            raise self.fail(f"{operation} failed to start: {error.Get_error_string()}") from error
        work = MPIWork(self, operation, requests, (keep, results), results, deliver)
        self._pending[id(work)] = work
        return work

    def check(self, operation: str) -> None:
        """Raise unless the group can still communicate."""
        if self.failure is not None:
            raise dist.DistBackendError(f"{operation} on an MPI group that failed: {self.failure}")

    def fail(self, text: str) -> dist.DistBackendError:
        """Remember that the group is lost and return the error that says so."""
        self.failure = f"{text} (rank {self.rank} of {self.size}, MPI group '{self.name}')"
        exit_hook.mark_failed(self)
        return dist.DistBackendError(
            f"{self.failure}. MPI cannot withdraw an operation: end this process; that ends the "
            "MPI job. Look for the first error among the ranks."
        )

    def forget(self, work: MPIWork) -> None:
        """Drop the reference that kept an operation's buffers alive; it has completed."""
        self._pending.pop(id(work), None)

    def close(self) -> None:
        """Complete what is under way and give the communicator back."""
        if self.failure is not None or MPI.Is_finalized():
            return
        for work in list(self._pending.values()):
            work.wait()
        self.failure = "it was destroyed"
        self.communicator.Free()


class MPIWork(dist.Work):
    """Handle of an operation under way; the buffers live at least until it completes."""

    def __init__(
        self,
        channel: Channel,
        operation: str,
        requests: list[MPI.Request],
        keep: Any,
        results: Sequence[torch.Tensor],
        deliver: Callable[[], None] | None,
    ) -> None:
        super().__init__()
        self._channel = channel
        self._operation = operation
        self._requests = requests
        self._keep = keep
        self._results = list(results)
        self._deliver = deliver
        self._status = MPI.Status()
        self._done = False

    def poll(self) -> bool:
        """Whether the operation has completed; lets MPI make progress, does not block."""
        if self._done:
            return True
        self._channel.check(self._operation)
        try:
            if len(self._requests) == 1:
                completed = self._requests[0].Test(self._status)
            else:
                completed = MPI.Request.Testall(self._requests)
        except MPI.Exception as error:
            raise self._channel.fail(
                f"{self._operation} failed: {error.Get_error_string()}"
            ) from error
        if completed:
            self._complete()
        return completed

    def _complete(self) -> None:
        self._done = True
        if self._deliver is not None:
            self._deliver()
        self._requests, self._keep, self._deliver = [], None, None
        self._channel.forget(self)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the operation has completed.

        Raises:
            torch.distributed.DistBackendError: A RuntimeError: if it fails, or takes longer than
                `timeout` (None or zero: the group's), because a rank is missing or does something
                else.
        """
        limit = timeout.total_seconds() if timeout else 0.0
        if limit <= 0:
            limit = self._channel.timeout.total_seconds()
        start = time.monotonic()
        polls = 0
        while not self.poll():
            polls += 1
            waited = time.monotonic() - start
            if waited > limit:
                raise self._channel.fail(
                    f"{self._operation} did not complete within {limit:g} s: a rank has ended, is "
                    "late, or went to something else"
                )
            if waited > _EAGER_SECONDS and polls % _POLLS_PER_NAP == 0:
                time.sleep(_NAP_SECONDS)
            else:
                _yield_core()
        return True

    def is_completed(self) -> bool:
        """Whether the operation has completed."""
        return self.poll()

    def is_success(self) -> bool:
        """Whether the operation has completed, and without an error."""
        return self._done

    def synchronize(self) -> None:
        """Wait: there is no stream that could wait instead."""
        self.wait()

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that hold the outcome."""
        return self._results

    def source_rank(self) -> int:
        """Return the group rank that a receive came from."""
        return int(self._status.Get_source())

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Wait, and return a future that holds the results: MPI moves on only when it is called."""
        self.wait()
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._results)
        return future
