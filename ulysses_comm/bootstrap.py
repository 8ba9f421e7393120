"""From however the ranks were started to a running torch.distributed, or one error that says why.

torchrun, mpirun and a bare `python program.py` are told apart; everything that is missing or
contradictory is named at once, on every rank, before anything waits for anybody.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store, TCPStore

from ulysses_comm import hardware
from ulysses_comm.mpi import BACKEND as MPI_BACKEND
from ulysses_comm.mpi import end_job_after_failure, load_mpi, register_backend
from ulysses_comm.symmetric.choice import TransportName, check_wish, use_transport
from ulysses_comm.watchdog import watchdog_problem

if TYPE_CHECKING:
    from mpi4py import MPI

_log = logging.getLogger("ulysses_comm")

LauncherName = Literal["torchrun", "mpirun", "bare"]

_TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# How many ranks an mpirun says it started; 0 where the variable holds something else. Only to
# notice an mpirun: ranks come from MPI itself, for the names and numbers differ between MPIs.
_MPI_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_MPI_TRACES = (*_MPI_SIZES, "PMI_RANK", "PMIX_RANK")


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How this rank came up.

    Attributes:
        launcher: What started it.
        rank: Its place among all ranks.
        world_size: Their number.
        local_rank: Its place among the ranks of this machine.
        device: The device to put its tensors on; already the current one.
        backend: The torch.distributed backend of the default group, and why this one.
    """

    launcher: LauncherName
    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: hardware.Choice


def init_distributed(
    backend: str | None = None,
    *,
    device: str | None = None,
    timeout: timedelta | None = None,
    launcher: LauncherName | None = None,
    transport: TransportName | None = None,
) -> Launch:
    """Start torch.distributed's default group on the ranks that torchrun or mpirun started.

    A program started by neither is a lone rank, and gets a group of one.

    Args:
        backend: A torch.distributed backend, or "ulysses_mpi"; None for the one that fits the
            device: mccl, nccl, and on the CPU gloo, or ulysses_mpi under mpirun.
        device: "cpu", "cuda" or "musa"; None for what the machine has, and the CPU with
            "ulysses_mpi".
        timeout: How long an operation may wait for other ranks before it raises; None for torch's
            default, which is 10 minutes on NCCL and 30 on others.
        launcher: "torchrun" (the environment variables that it sets), "mpirun" or "bare", where the
            environment leaves it open; None looks.
        transport: What carries the exchanges of the default group, as for `use_transport`; None
            leaves it at the backend's own all-to-all, or at ULYSSES_COMM_TRANSPORT.

    Returns:
        Rank, device and backend of this process. The group is torch's default group.

    Raises:
        RuntimeError: If something is missing, unknown or contradictory; the text lists all of it.
            Also if the ranks cannot use, or ask for different transports; no group is left then.
        ValueError: If launcher or transport is none of what it may be.

    Nothing is written to the environment. `torch.distributed.destroy_process_group()` ends it.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is initialised already. Use its default group, or call "
            "torch.distributed.destroy_process_group() first."
        )
    if transport is not None:
        check_wish(transport)
    started_by = launcher or detect_launcher(os.environ)
    starts = {
        "mpirun": _start_from_mpi,
        "torchrun": _start_from_environment,
        "bare": _start_alone,
    }
    if started_by not in starts:
        raise ValueError(f"launcher={launcher!r}: expected 'torchrun', 'mpirun', 'bare' or None.")
    launch = starts[started_by](backend, device, timeout)
    if "nccl" in launch.backend.name and (problem := watchdog_problem(os.environ)):
        _log.warning("ulysses_comm: %s", problem)
    if transport is not None:
        try:
            use_transport(None, transport)
        except RuntimeError:
            dist.destroy_process_group()  # nothing is left half started
            raise
    return launch


def detect_launcher(environment: Mapping[str, str]) -> LauncherName:
    """Tell from environment variables what started this process.

    Raises:
        RuntimeError: If they contradict each other, or are incomplete.
    """
    given = [name for name in (*_TORCH_VARIABLES, "LOCAL_RANK") if environment.get(name)]
    complete = set(_TORCH_VARIABLES) <= set(given)
    mpi_size = _mpi_size(environment)
    if complete and mpi_size is not None and mpi_size > 1:
        if environment["WORLD_SIZE"] != str(mpi_size):
            raise _start_error(
                [
                    f"WORLD_SIZE={environment['WORLD_SIZE']}, but mpirun started {mpi_size} ranks: "
                    "pass launcher='mpirun' or launcher='torchrun' to say which of them counts"
                ],
                environment,
            )
        return "torchrun"
    if complete:
        return "torchrun"
    # A container may set some of torch's variables; under mpirun they decide nothing.
    if mpi_size is not None and (mpi_size > 1 or not given):
        return "mpirun"
    if given:
        raise _start_error(_environment_problems(environment), environment)
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks != "1":
        raise _start_error(
            [
                f"srun started {tasks} tasks, but neither torch's variables nor MPI's are set, so "
                "each would believe to be alone: use srun --mpi=pmi2 or --mpi=pmix, or set torch's "
                "variables from SLURM_PROCID and SLURM_NTASKS, or pass launcher='bare'"
            ],
            environment,
        )
    return "bare"


def launched_size(environment: Mapping[str, str]) -> int:
    """Tell how many ranks torchrun or mpirun say they started; 1 if there was none."""
    if all(environment.get(name) for name in _TORCH_VARIABLES):
        size = environment["WORLD_SIZE"]
        return int(size) if size.isdecimal() else 1
    return _mpi_size(environment) or 1


def _mpi_size(environment: Mapping[str, str]) -> int | None:
    """Return how many ranks an mpirun started; 0 if it does not say, None if there was none."""
    if not any(environment.get(name) for name in _MPI_TRACES):
        return None
    sizes = [environment[name] for name in _MPI_SIZES if environment.get(name, "").isdecimal()]
    return int(sizes[0]) if sizes else 0


def _start_alone(backend: str | None, device: str | None, timeout: timedelta | None) -> Launch:
    problems, place, choice = _plan(0, backend, device, mpi_ranks=False)
    if problems:
        raise _start_error(problems, os.environ)
    launch = Launch(
        launcher="bare", rank=0, world_size=1, local_rank=0, device=place, backend=choice
    )
    _join(launch, HashStore(), timeout)
    return launch


def _start_from_environment(
    backend: str | None, device: str | None, timeout: timedelta | None
) -> Launch:
    problems = _environment_problems(os.environ)
    local_rank = os.environ.get("LOCAL_RANK", "")
    if not local_rank.isdecimal():
        if local_rank or _needs_own_device(device):
            problems.append(
                f"LOCAL_RANK {_shown(local_rank)}: expected this rank's number on its machine, "
                "which decides its GPU"
            )
        local_rank = "0"
    more, place, choice = _plan(int(local_rank), backend, device, mpi_ranks=False)
    if problems or more:
        raise _start_error(problems + more, os.environ)
    launch = Launch(
        launcher="torchrun",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        local_rank=int(local_rank),
        device=place,
        backend=choice,
    )
    _join(launch, None, timeout)
    return launch


def _start_from_mpi(backend: str | None, device: str | None, timeout: timedelta | None) -> Launch:
    try:
        world = load_mpi().COMM_WORLD
    except RuntimeError as error:
        raise _start_error([str(error)], os.environ) from error
    started = _mpi_size(os.environ) or 0
    if started > 1 and world.size == 1:
        library = load_mpi().Get_library_version().splitlines()[0]
        raise _start_error(
            [
                f"mpirun started {started} ranks, but mpi4py runs on another MPI ({library}), in "
                "which each of them is alone: use the mpirun of that MPI, or point mpi4py at the "
                "library of this mpirun with MPI4PY_LIBMPI"
            ],
            os.environ,
        )
    end_job_after_failure()
    local = world.Split_type(load_mpi().COMM_TYPE_SHARED)
    local_rank, local_size = local.rank, local.size
    local.Free()
    problems, place, choice = _plan(local_rank, backend, device, mpi_ranks=True)
    _raise_everywhere(world, problems)
    launch = Launch(
        launcher="mpirun",
        rank=world.rank,
        world_size=world.size,
        local_rank=local_rank,
        device=place,
        backend=choice,
    )
    _join(launch, _open_store(world, alone_on_host=local_size == world.size), timeout)
    return launch


def _plan(
    local_rank: int, backend: str | None, device: str | None, *, mpi_ranks: bool
) -> tuple[list[str], torch.device, hardware.Choice]:
    """Choose device and backend; problems are returned, so that all of them can be named."""
    problems = []
    place = torch.device("cpu")
    if backend == MPI_BACKEND and device is None:
        device = "cpu"  # whatever else the machine has
    try:
        place = hardware.device_for_rank(local_rank, device)
    except (ValueError, RuntimeError) as error:
        problems.append(str(error))
    choice = (
        hardware.choose_backend(place.type, mpi_ranks=mpi_ranks)
        if backend is None
        else hardware.Choice(backend, "the caller asked for it")
    )
    # Without a device, whether they fit each other is no question yet.
    problems += hardware.backend_problems(choice.name, None if problems else place.type)
    if choice.name == MPI_BACKEND:
        try:
            load_mpi()
        except RuntimeError as error:
            problems.append(str(error))
    return problems, place, choice


def _join(launch: Launch, store: Store | None, timeout: timedelta | None) -> None:
    """Make the default group, on this store or where torch's environment variables say."""
    if launch.backend.name == MPI_BACKEND:
        register_backend()
    hardware.load_torchada(launch.device)
    hardware.use_device(launch.device)
    arguments: dict[str, Any] = {}
    if store is not None:
        arguments.update(store=store, rank=launch.rank, world_size=launch.world_size)
    if launch.backend.name == "nccl":
        # Bound to its device, NCCL connects now rather than guessing in the first barrier.
        arguments["device_id"] = launch.device
    dist.init_process_group(launch.backend.name, timeout=timeout, **arguments)


def _open_store(world: MPI.Intracomm, *, alone_on_host: bool) -> Store:
    """Open a TCPStore on rank 0 and connect all others to it; all of them fail if one does."""
    host = os.environ.get("MASTER_ADDR") or ("127.0.0.1" if alone_on_host else socket.gethostname())
    port = os.environ.get("MASTER_PORT") or "0"  # 0: any free one
    store: TCPStore | None = None
    problem = ""
    if world.rank == 0:
        try:
            store = TCPStore(host, int(port), world.size, is_master=True, wait_for_workers=False)
            port = str(store.port)
        except (RuntimeError, ValueError) as error:
            problem = f"it cannot open a store on MASTER_ADDR {host}, MASTER_PORT {port}: {error}"
    host, port, opened = world.bcast((host, port, not problem), root=0)
    if world.rank > 0 and opened:
        try:
            store = TCPStore(host, int(port), world.size, is_master=False, wait_for_workers=False)
        except (RuntimeError, ValueError) as error:
            problem = (
                f"it cannot reach the store of rank 0 on {host}, port {port}: {error}. Set "
                "MASTER_ADDR to an address of rank 0 that all machines can reach"
            )
    _raise_everywhere(world, [problem] if problem else [])
    return cast(TCPStore, store)


def _raise_everywhere(world: MPI.Intracomm, problems: list[str]) -> None:
    """Raise the problems of all ranks on all ranks."""
    ranks_by_problem: dict[str, list[int]] = {}
    for rank, found in enumerate(world.allgather(problems)):
        for problem in found:
            ranks_by_problem.setdefault(problem, []).append(rank)
    if ranks_by_problem:
        raise _start_error(
            [f"rank {_ranges(ranks)}: {text}" for text, ranks in ranks_by_problem.items()],
            os.environ,
        )


def _ranges(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) < 9 else f"{ranks[0]} and {len(ranks) - 1} more"


def _needs_own_device(device: str | None) -> bool:
    try:
        return hardware.choose_device(device).name != "cpu"
    except (ValueError, RuntimeError):
        return False  # reported where the device is chosen


def _environment_problems(environment: Mapping[str, str]) -> list[str]:
    """Say what is missing or wrong in the variables that torchrun sets."""
    problems = []
    values = {name: environment.get(name, "") for name in _TORCH_VARIABLES}
    rank, world_size, address, port = values.values()
    if not (world_size.isdecimal() and int(world_size) > 0):
        problems.append(f"WORLD_SIZE {_shown(world_size)}: expected the number of ranks")
    if not rank.isdecimal():
        problems.append(f"RANK {_shown(rank)}: expected this rank's number, counted from 0")
    elif world_size.isdecimal() and int(rank) >= int(world_size) > 0:
        problems.append(f"RANK={rank} with WORLD_SIZE={world_size}: ranks count from 0")
    if not address:
        problems.append("MASTER_ADDR is not set: expected the address of rank 0")
    if not (port.isdecimal() and 0 < int(port) < 65536):
        problems.append(f"MASTER_PORT {_shown(port)}: expected a free port of rank 0")
    return problems


def _shown(value: str) -> str:
    return f"is {value!r}" if value else "is not set"


def _start_error(problems: list[str], environment: Mapping[str, str]) -> RuntimeError:
    present = [
        f"{name}={environment[name]}"
        for name in (*_TORCH_VARIABLES, "LOCAL_RANK", *_MPI_TRACES)
        if environment.get(name)
    ]
    return RuntimeError(
        "torch.distributed cannot start:\n"
        + "".join(f"  - {problem}\n" for problem in problems)
        + f"The environment has {', '.join(present) or 'no variable of torchrun or mpirun'}.\n"
        "Start the ranks with 'torchrun --nproc-per-node 4 program.py' or 'mpirun -n 4 python "
        "program.py'; started as 'python program.py' it is a lone rank."
    )
