"""Rank threads in lock step: exactly one runs, and the baton passes in a fixed order."""

from __future__ import annotations

import contextvars
import ctypes
import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Any, Protocol

from ulysses_comm.simulator.errors import AbortedError, DeadlockError, SimulationError, name_rank
from ulysses_comm.simulator.random_streams import RandomStreams
from ulysses_comm.simulator.text import ranges
from ulysses_comm.simulator.thread_state import ThreadState

# An interrupted run gives its ranks this long to notice, then interrupts the one that computes,
# and after as long again leaves its thread behind rather than the caller waiting.
_INTERRUPT_PATIENCE_SECONDS = 2.0
# A signal that arrives just before a thread falls asleep does not wake it. The waiting caller wakes
# up this often by itself, so that Ctrl-C is never lost.
_SIGNAL_SECONDS = 0.5
# So many questions per rank "is it done?", all answered no and nothing else happening in between,
# mean that the answer will never change.
_FRUITLESS_POLLS_PER_RANK = 1000

_this_thread = threading.local()
_OWN_MODULES = ("ulysses_comm.simulate", "ulysses_comm.simulator")


class Waitable(Protocol):
    """Something a rank can wait for."""

    done: bool

    def describe(self) -> str:
        """Say what is waited for, and for whom, in one line."""


def current_rank() -> tuple[Scheduler, int] | None:
    """Return the simulation and rank that the calling thread runs; None in any other thread."""
    return getattr(_this_thread, "scheduler_and_rank", None)


def _is_own(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith(_OWN_MODULES)


def _location(frame: FrameType | None) -> str:
    """Find the innermost line that belongs neither to torch nor to this package.

    Where all lines do, as in its demo, the innermost one outside the simulator.
    """
    own_line = ""
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in ("torch", "threading", "contextlib") and not _is_own(frame):
            line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            if package != "ulysses_comm":
                return line
            own_line = own_line or line
        frame = frame.f_back
    return own_line


def location_of_caller() -> str:
    """Say which line of user code is running."""
    return _location(sys._getframe(1))


def _without_own_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Drop the simulator's frames from the outer end, so that a traceback starts in user code."""
    rest = traceback
    while rest is not None and _is_own(rest.tb_frame):
        rest = rest.tb_next
    return rest if rest is not None else traceback


class Scheduler:
    """`world_size` rank threads of which exactly one, the holder of the baton, runs at a time.

    A rank keeps the baton until it has to wait; then the next rank in ring order that can run gets
    it. Nothing else switches ranks, so a run is the same whatever the operating system does.
    """

    def __init__(self, world_size: int, *, seed: int | None) -> None:
        self.world_size = world_size
        self.error: BaseException | None = None
        self.error_rank: int | None = None
        self._story: str = ""
        # Handles that nobody has waited for yet, per rank, by identity.
        self.pending: list[dict[int, Any]] = [{} for _ in range(world_size)]
        self._streams = RandomStreams(world_size, seed)
        self._thread_state = ThreadState()
        self._batons = [threading.Lock() for _ in range(world_size)]
        for baton in self._batons:
            baton.acquire()
        self._waits: list[Waitable | None] = [None] * world_size
        self._started = [False] * world_size
        self._finished = [False] * world_size
        self._threads: list[threading.Thread] = []
        self._everyone_finished = threading.Event()
        self._holder = 0
        self._fruitless_polls = 0
        self._closed = False

    def run(self, body: Callable[[int], None], *, thread_name: str) -> None:
        """Run `body(rank)` once per rank and raise the first error, if there was one."""
        try:
            self._start_threads(body, thread_name)
            while not self._everyone_finished.wait(_SIGNAL_SECONDS):
                pass
            for thread in self._threads:
                thread.join()
        except BaseException as interruption:
            self._interrupt(interruption)
            raise
        finally:
            self._closed = True
            self._streams.restore_caller()
        error = self.error
        if error is None:
            return
        if self.error_rank is not None:
            name_rank(error, self._story)
        try:
            raise error.with_traceback(_without_own_frames(error.__traceback__))
        finally:
            # The traceback's frames hold this scheduler: leave no reference cycle behind.
            self.error = None
            del error

    def block(self, rank: int, wait: Waitable) -> None:
        """Return once `wait.done`; let the other ranks run until then.

        Raises:
            AbortedError: If the run has failed, or fails in the meantime.
        """
        self.raise_if_failed(wait)
        if not wait.done:
            self._waits[rank] = wait
            self._switch_from(rank)
            self._waits[rank] = None
            self.raise_if_failed(wait)
        self.note_progress()

    def poll(self, rank: int, wait: Waitable) -> bool:
        """Tell whether `wait.done`, and let the other ranks run once if it is not.

        Raises:
            DeadlockError: If the ranks do nothing but poll, again and again.
        """
        self.raise_if_failed(wait)
        if wait.done:
            return True
        self._fruitless_polls += 1
        if self._fruitless_polls >= _FRUITLESS_POLLS_PER_RANK * self.world_size:
            self._waits[rank] = wait
            self.fail(self._deadlock(), None)
            self._waits[rank] = None
        self._switch_from(rank)
        self.raise_if_failed(wait)
        return wait.done

    def note_progress(self) -> None:
        """Note that a rank did more than asking whether something is done."""
        self._fruitless_polls = 0

    def fail(self, error: BaseException, rank: int | None) -> None:
        """Note that the run has failed; the first error is the one that counts."""
        if self.error is None:
            self.error = error
            self.error_rank = rank
            if rank is not None:
                others = self._states(r for r in range(self.world_size) if r != rank)
                self._story = "\n  ".join(
                    [f"raised by simulated rank {rank} of {self.world_size}", *others]
                )

    def raise_if_failed(self, wait: Waitable | None = None) -> None:
        """Stop a rank of a run that has failed or is over."""
        error = self.error
        if error is None and not self._closed:
            return
        where = f" in {wait.describe()}" if wait is not None else ""
        if error is None:
            raise SimulationError(f"this simulated group's run is over; used{where}")
        blame = "" if self.error_rank is None else f"rank {self.error_rank}: "
        raise AbortedError(
            f"stopped{where} because the simulation failed: {blame}{type(error).__name__}: {error}"
        ) from error

    def require_current(self, rank: int) -> None:
        """Refuse a call that does not come from the thread of `rank` itself."""
        current = current_rank()
        if current is not None and current[0] is self and current[1] == rank:
            return
        if self._closed:
            raise SimulationError("this simulated group's run is over; ask for a new simulation")
        caller = (
            f"thread {threading.current_thread().name!r}, which is no rank of this simulation"
            if current is None or current[0] is not self
            else f"rank {current[1]}"
        )
        raise SimulationError(
            f"the simulated group of rank {rank} was used by {caller}: every rank must use the "
            f"group that it was given, in the thread that it was given"
        )

    def _states(self, ranks: Iterable[int]) -> list[str]:
        """Say what ranks are doing, a line for all that do the same."""
        alike: dict[str, list[int]] = {}
        for rank in ranks:
            alike.setdefault(self._state_of(rank), []).append(rank)
        return [
            f"{'rank' if len(same) == 1 else 'ranks'} {ranges(same)}: {state}"
            for state, same in alike.items()
        ]

    def _state_of(self, rank: int) -> str:
        if self._finished[rank]:
            return "returned"
        wait = self._waits[rank]
        if wait is not None:
            return f"waiting in {wait.describe()}{self._location_of(rank)}"
        if rank == self._holder:
            return "running"
        return "ready to go on" if self._started[rank] else "not started"

    def _run_rank(self, body: Callable[[int], None], rank: int) -> None:
        self._batons[rank].acquire()
        try:
            self._holder = rank
            self._started[rank] = True
            self._streams.enter(rank)
            _this_thread.scheduler_and_rank = (self, rank)
            if self.error is None:
                with self._thread_state.entered():
                    body(rank)
        except AbortedError as error:
            # Only the consequence of an error that is already noted.
            if self.error is None:
                self.fail(error, rank)
        except BaseException as error:
            self.fail(error, rank)
        finally:
            _this_thread.scheduler_and_rank = None
            self._streams.leave(rank)
            self._finished[rank] = True
            self._pass_on(rank)

    def _runnable(self, rank: int) -> bool:
        if self._finished[rank]:
            return False
        wait = self._waits[rank]
        return wait is None or wait.done or self.error is not None

    def _next_after(self, rank: int) -> int | None:
        for step in range(1, self.world_size + 1):
            candidate = (rank + step) % self.world_size
            if self._runnable(candidate):
                return candidate
        return None

    def _choose_after(self, rank: int) -> int | None:
        chosen = self._next_after(rank)
        if chosen is None and not all(self._finished):
            self.fail(self._deadlock(), None)
            chosen = self._next_after(rank)
        return chosen

    def _switch_from(self, rank: int) -> None:
        chosen = self._choose_after(rank)
        if chosen == rank:
            return
        assert chosen is not None, "a rank that waits makes at least itself runnable by failing"
        self._streams.leave(rank)
        self._batons[chosen].release()
        self._batons[rank].acquire()
        self._holder = rank
        self._streams.enter(rank)

    def _pass_on(self, rank: int) -> None:
        chosen = self._choose_after(rank)
        if chosen is None:
            self._everyone_finished.set()
        else:
            self._batons[chosen].release()

    def _deadlock(self) -> DeadlockError:
        lines = ["no simulated rank can go on:", *self._states(range(self.world_size))]
        return DeadlockError("\n  ".join(lines))

    def _location_of(self, rank: int) -> str:
        """Where the code of a waiting rank is, found only when somebody asks."""
        if rank >= len(self._threads):
            return ""
        frame = sys._current_frames().get(self._threads[rank].ident or -1)
        location = _location(frame)
        return f" at {location}" if location else ""

    def _interrupt(self, interruption: BaseException) -> None:
        """End every rank after an exception in the caller's thread, such as Ctrl-C."""
        self.fail(interruption, None)
        if self._everyone_finished.wait(_INTERRUPT_PATIENCE_SECONDS):
            return
        holder = self._threads[self._holder]
        if holder.ident is not None and holder.is_alive():
            # A rank that computes without communicating does not notice the error by itself.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(holder.ident), ctypes.py_object(KeyboardInterrupt)
            )
        self._everyone_finished.wait(_INTERRUPT_PATIENCE_SECONDS)

    def _start_threads(self, body: Callable[[int], None], thread_name: str) -> None:
        """Start every rank's thread, then hand the baton to rank 0."""
        try:
            for rank in range(self.world_size):
                # A context of its own: what one rank sets in a context variable stays with it.
                context = contextvars.copy_context()
                thread = threading.Thread(
                    target=context.run,
                    args=(self._run_rank, body, rank),
                    name=f"{thread_name}-rank{rank}",
                    daemon=True,
                )
                thread.start()
                self._threads.append(thread)
        except BaseException as error:
            self.fail(error, None)
            for rank in range(len(self._threads), self.world_size):
                self._finished[rank] = True
            raise
        finally:
            if self._threads:
                self._batons[0].release()
            else:
                self._everyone_finished.set()
