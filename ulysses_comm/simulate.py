"""Many ranks in one process: lock-step, faults reported, traffic recorded."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch._C._distributed_c10d import (
    _register_process_group,
    _unregister_process_group,
)

from ulysses_comm.simulator.process_group import SimulatedProcessGroup
from ulysses_comm.simulator.rendezvous import Group, Recorder
from ulysses_comm.simulator.scheduler import Scheduler
from ulysses_comm.simulator.traffic import Traffic

Result = TypeVar("Result")

_serial = itertools.count()


@dataclass(frozen=True)
class Simulation(Generic[Result]):
    """What a simulation leaves behind.

    Attributes:
        results: What each rank returned, in rank order.
        traffic: What travelled.
    """

    results: list[Result]
    traffic: Traffic


def simulate(
    world_size: int,
    step: Callable[[SimulatedProcessGroup], Result],
    *,
    seed: int | None = None,
    digests: bool = False,
) -> Simulation[Result]:
    """Run `step(group)` once per rank inside this process."""
    scheduler = Scheduler(world_size, seed=seed)
    recorder = Recorder(world_size, digests=digests)
    name = f"simulated_{next(_serial)}"
    group = Group(scheduler, recorder, name, range(world_size))
    results: dict[int, Result] = {}

    def body(rank: int) -> None:
        registered_name: Any = f"{name}/rank_{rank}"
        process_group = SimulatedProcessGroup(group, rank, registered_name)
        _register_process_group(registered_name, process_group)
        try:
            results[rank] = step(process_group)
        finally:
            _unregister_process_group(registered_name)

    scheduler.run(body, thread_name=name)
    return Simulation([results[rank] for rank in range(world_size)], recorder.traffic)
