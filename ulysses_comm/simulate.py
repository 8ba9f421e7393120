"""Many ranks in one process: in lock step, faults reported, traffic recorded.

`simulate` gives every rank a group and needs nothing else. `simulate_world` makes the ranks a
torch.distributed world, so that programs that use the default group run unmodified. Both take CPU
tensors and GPU tensors alike. docs/simulator.md describes them at length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ulysses_comm.simulator import default_world
from ulysses_comm.simulator.cost_model import (
    CostModel,
    Link,
    Prediction,
    head_exchange_bytes,
    predict,
)
from ulysses_comm.simulator.errors import (
    AbortedError,
    AsyncMisuseError,
    DeadlockError,
    MismatchError,
    SimulationError,
)
from ulysses_comm.simulator.oracle import simulate_all_to_all
from ulysses_comm.simulator.process_group import SimulatedProcessGroup
from ulysses_comm.simulator.traffic import Traffic
from ulysses_comm.simulator.world import (
    Unwaited,
    World,
    record_traffic,
    registered,
    running,
)

__all__ = [
    "AbortedError",
    "AsyncMisuseError",
    "CostModel",
    "DeadlockError",
    "Link",
    "MismatchError",
    "Prediction",
    "SimulatedProcessGroup",
    "Simulation",
    "SimulationError",
    "Traffic",
    "head_exchange_bytes",
    "predict",
    "record_traffic",
    "simulate",
    "simulate_all_to_all",
    "simulate_world",
]

Result = TypeVar("Result")


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
    unwaited: Unwaited = "error",
) -> Simulation[Result]:
    """Run `step(group)` once per rank inside this process.

    Each rank has a thread, and exactly one of them runs at a time; a rank runs until it has to wait
    for others. `group` works wherever torch.distributed takes `group=`, and in functional
    collectives; nothing is initialised, and a real default group stays in place. What needs the
    default group (`dist.get_rank()`, DeviceMesh, `dist.new_group`) needs `simulate_world`.

    Args:
        world_size: Number of ranks.
        step: What every rank does. Runs with the caller's grad mode, autocast, default device and
            context variables.
        seed: None: every rank starts with a copy of the caller's random state. A number: every rank
            has a stream of its own, derived from (seed, rank). Either way the caller's state is
            untouched afterwards. Covers torch, `random` and `numpy.random`.
        digests: Also record the SHA-256 of every buffer that is sent, and use it to find
            send buffers that are overwritten behind torch's back.
        unwaited: What to do if an asynchronous call was never waited for.

    Returns:
        What the ranks returned, and what travelled.

    Raises:
        ValueError: If an argument is out of range.
        DeadlockError: If no rank can go on; says where each one waits.
        MismatchError: If ranks disagree about a collective; says which, and both values.
        AsyncMisuseError: If buffers of an asynchronous call were touched before `wait()`, or it was
            never waited for.
        SimulationError: If another thread runs a simulation at the same time.
        Exception: Whatever a rank raised first, as it is.
    """
    world = World(world_size, seed=seed, digests=digests, unwaited=unwaited)
    with running(world, nested=True) as depth:
        name = f"simulated_{depth}"

        def body(rank: int) -> Result:
            group = world.process_group(
                name,
                name,
                range(world_size),
                rank,
                f"ulysses_comm/{name}/rank_{rank}_of_{world_size}",
            )
            with registered(group):
                return step(group)

        return Simulation(world.run(body, name), world.traffic)


def simulate_world(
    world_size: int,
    program: Callable[[], Result],
    *,
    seed: int | None = None,
    digests: bool = False,
    unwaited: Unwaited = "error",
) -> Simulation[Result]:
    """Run `program()` once per rank, with the simulated world as torch.distributed's default group.

    Inside, torch.distributed is initialised: `dist.get_rank()`, `dist.new_group`, DeviceMesh,
    DTensor, DDP, FSDP2, object collectives and functional collectives work on the simulated ranks.
    A real default group of this process is hidden meanwhile and back afterwards.

    Args:
        world_size: Number of ranks.
        program: What every rank does. It must not initialise torch.distributed again.
        seed: As for `simulate`.
        digests: As for `simulate`.
        unwaited: As for `simulate`.

    Returns:
        What the ranks returned, and what travelled.

    Raises:
        SimulationError: If it is called from inside a simulated rank; else as for `simulate`.
    """
    world = World(world_size, seed=seed, digests=digests, unwaited=unwaited)
    with running(world, nested=False), default_world.swapped_in():

        def body(rank: int) -> Result:
            with default_world.initialised(world, rank):
                return program()

        return Simulation(world.run(body, "simulated_world"), world.traffic)
