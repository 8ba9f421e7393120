"""A simulated world: its ranks, their groups, and what is left over at the end."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d_bindings
from torch.distributed import distributed_c10d

from ulysses_comm.simulator.errors import AsyncMisuseError, SimulationError
from ulysses_comm.simulator.messages import Mailbox
from ulysses_comm.simulator.process_group import SimulatedProcessGroup
from ulysses_comm.simulator.recorder import Recorder
from ulysses_comm.simulator.rendezvous import Group
from ulysses_comm.simulator.scheduler import Scheduler
from ulysses_comm.simulator.store import SimulatedStore
from ulysses_comm.simulator.traffic import Traffic

Result = TypeVar("Result")
Unwaited = Literal["error", "warn", "ignore"]

_lock = threading.Lock()
# Simulations that run at present; each later one was started by a rank of the one before it.
_running: list[World] = []
_this_thread = threading.local()


class World:
    """`world_size` simulated ranks and the groups that they form.

    Args:
        world_size: Number of ranks.
        seed: See `ulysses_comm.simulate.simulate`.
        digests: See `ulysses_comm.simulate.simulate`.
        unwaited: See `ulysses_comm.simulate.simulate`.
    """

    def __init__(
        self, world_size: int, *, seed: int | None, digests: bool, unwaited: Unwaited
    ) -> None:
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise ValueError(f"world_size={world_size!r}: expected a positive number of ranks")
        if unwaited not in ("error", "warn", "ignore"):
            raise ValueError(f"unwaited={unwaited!r}: expected 'error', 'warn' or 'ignore'")
        self.world_size = world_size
        self.recorder = Recorder(world_size, digests=digests)
        self._unwaited = unwaited
        self._seed = seed
        self._groups: dict[object, tuple[Group, Mailbox, SimulatedStore]] = {}
        self._generations: dict[tuple[int, object], int] = {}
        self._never_waited_for: list[str] = []

    @property
    def traffic(self) -> Traffic:
        """What has travelled so far."""
        return self.recorder.traffic

    def run(self, body: Callable[[int], Result], name: str) -> list[Result]:
        """Run `body(rank)` once per rank and return the results in rank order."""
        keep_compiling_threads_alive()
        self.scheduler = Scheduler(self.world_size, seed=self._seed)
        self.store = SimulatedStore(self.scheduler, "the simulated world")
        results: dict[int, Result] = {}

        def run_rank(rank: int) -> None:
            _this_thread.world_and_rank = (self, rank)
            try:
                results[rank] = body(rank)
            finally:
                self._abandon_pending(rank)

        try:
            self.scheduler.run(run_rank, thread_name=name)
        finally:
            self.recorder.close()
        self._report_unwaited()
        return [results[rank] for rank in range(self.world_size)]

    def process_group(
        self, key: object, name: str, ranks: Sequence[int], rank: int, registered_name: str
    ) -> SimulatedProcessGroup:
        """Return the process group of one rank; the same `key` means the same group."""
        shared = self._groups.get(key)
        if shared is None:
            group = Group(self.scheduler, self.recorder, name, ranks)
            shared = (group, Mailbox(group), SimulatedStore(self.scheduler, str(group)))
            self._groups[key] = shared
        return SimulatedProcessGroup(*shared, rank, registered_name)

    def next_generation(self, rank: int, key: object) -> int:
        """Count how often a rank has made the group `key` before."""
        generation = self._generations.get((rank, key), 0)
        self._generations[rank, key] = generation + 1
        return generation

    def _report_unwaited(self) -> None:
        left = self._never_waited_for
        if not left or self._unwaited == "ignore":
            return
        text = (
            f"{len(left)} asynchronous calls were never waited for, so their results were never "
            f"delivered:\n  " + "\n  ".join(left)
        )
        if self._unwaited == "error":
            raise AsyncMisuseError(text)
        warnings.warn(text, stacklevel=4)

    def _abandon_pending(self, rank: int) -> None:
        """Let go what a rank leaves; in its own thread, where torch keeps its list of them."""
        pending = self.scheduler.pending[rank]
        for work in pending.values():
            self._never_waited_for.append(f"rank {rank}: {work}")
            work.abandon()
        pending.clear()


@contextlib.contextmanager
def running(world: World, *, nested: bool) -> Iterator[int]:
    """Take the process for a simulation; yields how many others run around it.

    Raises:
        SimulationError: If another thread simulates at present, or if a rank of a simulation
            starts one of a kind that cannot be nested.
    """
    with _lock:
        if _running and (not nested or _running[-1] is not current_world()):
            where = (
                "from inside a simulated rank, which simulate_world cannot do; use simulate there"
                if _running[-1] is current_world()
                else "while another thread runs one: both would share the random generators and "
                "torch's registry of groups. Run one after the other"
            )
            raise SimulationError(f"a simulation was started {where}")
        depth = len(_running)
        _running.append(world)
    try:
        yield depth
    finally:
        with _lock:
            _running.remove(world)


def current_world() -> World | None:
    """Return the simulation that the calling thread is a rank of."""
    current: tuple[World, int] | None = getattr(_this_thread, "world_and_rank", None)
    return None if current is None else current[0]


@contextlib.contextmanager
def record_traffic() -> Iterator[Traffic]:
    """Record, inside a simulated rank, the collectives that this rank issues in a with block.

    Yields:
        The record; it grows while the block runs and can be read in it. As in the whole record,
        each entry covers all ranks of its collective.

    Raises:
        SimulationError: If the calling thread is no simulated rank.
    """
    current: tuple[World, int] | None = getattr(_this_thread, "world_and_rank", None)
    if current is None:
        raise SimulationError(
            "record_traffic() only works inside a simulated rank, that is in what simulate or "
            "simulate_world runs"
        )
    world, rank = current
    log = world.recorder.open_log(rank)
    try:
        yield log
    finally:
        world.recorder.close_log(rank, log)


def keep_compiling_threads_alive() -> None:
    """Do in the caller's thread what torch would else do in the first rank that compiles.

    On a CUDA build of torch 2.11 and a machine without a GPU, the first thread that enters
    fake-tensor mode installs an object that dies with it, and the next one ends the process by a
    segmentation fault. The caller's thread outlives its ranks. Costs microseconds.
    """
    if torch.version.cuda is not None:
        torch._C._ensureCUDADeviceGuardSet()


@contextlib.contextmanager
def registered(process_group: SimulatedProcessGroup) -> Iterator[None]:
    """Make a group that torch did not make itself known to torch for the length of a with block.

    Functional collectives and operators find it by its name. `src=`, `dst=` and `dist.recv`, which
    translate ranks, know its ranks too; not while there is a default group, however, since
    `dist.get_rank(group)` would then answer with a rank of that group instead of refusing.
    """
    name: Any = process_group.group_name
    translations: dict[Any, dict[int, int]] = {}
    if not dist.is_initialized():
        translations = distributed_c10d._world.pg_group_ranks
    c10d_bindings._register_process_group(name, process_group)
    translations[process_group] = {rank: rank for rank in range(process_group.size())}
    try:
        yield
    finally:
        translations.pop(process_group, None)
        c10d_bindings._unregister_process_group(name)
