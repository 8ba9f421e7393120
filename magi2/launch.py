"""One way to run a program on the ranks of torchrun or mpirun, or on simulated ones.

    result = run_on_ranks(program, sizes, simulate=4)      # program(ranks) on every rank

A rank that fails says so in the store that all ranks share, so that the others can name it when
they find it gone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Generic, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from magi2.rank_agreement import UnlikeRanksError, check_alike
from magi2.topology import Topology
from ulysses_comm import hardware
from ulysses_comm.bootstrap import init_distributed
from ulysses_comm.simulate import simulate_world

Result = TypeVar("Result")

# One rank encodes text while the others wait for it, and may take long on a CPU.
DEFAULT_TIMEOUT = timedelta(hours=1)
_FAILURE_KEY = "magi2/first_failure"
_STORE_PATIENCE = timedelta(seconds=2)


@dataclass(frozen=True, kw_only=True)
class ParallelSizes:
    """How the ranks divide the work: cfg x ulysses of them, with the experts inside ulysses.

    Args:
        ulysses: Ranks that share the tokens of a branch; None for all that cfg leaves.
        cfg: 1 packs both branches of guidance into one sequence, 2 gives each its own ranks.
        expert: Ranks that share the experts; None for the most that leaves no expert head to pad.

    Raises:
        ValueError: If a number is out of range.
    """

    ulysses: int | None = None
    cfg: int = 1
    expert: int | None = None

    def __post_init__(self) -> None:
        for name in ("ulysses", "expert"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: expected a positive number of ranks, or None.")
        if self.cfg not in (1, 2):
            raise ValueError(
                f"cfg={self.cfg}: expected 1, both branches packed on all ranks, or 2, a half of "
                "the ranks for each branch."
            )

    def ulysses_of(self, world_size: int) -> int:
        """Ranks that share the tokens, out of so many.

        Raises:
            ValueError: If the sizes do not give world_size.
        """
        ulysses = world_size // self.cfg if self.ulysses is None else self.ulysses
        if ulysses * self.cfg != world_size or ulysses < 1:
            asked = "" if self.ulysses is None else f"ulysses degree {self.ulysses} x "
            raise ValueError(
                f"{asked}cfg parallel size {self.cfg} does not give the {world_size} rank(s) that "
                "were started: expected ulysses degree x cfg parallel size to be their number. "
                f"Start {ulysses * self.cfg or self.cfg} ranks, or give other sizes."
            )
        if self.expert is not None and ulysses % self.expert:
            raise ValueError(
                f"expert parallel size {self.expert} does not divide the ulysses degree {ulysses}: "
                "expected equal runs of the ranks that share the tokens."
            )
        return ulysses


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """All ranks, as one of them sees them.

    Args:
        device: Where this rank's tensors belong.
        rank: Its place among all ranks.
        world_size: Their number.
        launcher: What started them.
        topology: This rank's groups.
    """

    device: torch.device
    rank: int
    world_size: int
    launcher: Literal["torchrun", "mpirun", "bare", "caller", "simulated"]
    topology: Topology = field(default_factory=Topology)

    @property
    def is_first(self) -> bool:
        """Whether this rank reads, writes and speaks for all."""
        return self.rank == 0

    def on_first(self, work: Callable[[], Result]) -> Result:
        """Run on the first rank alone and return its result on every rank.

        Raises:
            Exception: Whatever work raises, on the first rank; all ranks must call this.
            OtherRankError: On the others, if it did.
        """
        if self.world_size == 1:
            return work()
        outcome: _Outcome[Result] | None = None
        caught: Exception | None = None
        if self.is_first:
            try:
                outcome = _Outcome(result=work())
            except Exception as error:
                if self.launcher == "simulated":
                    raise  # the simulator stops the others, and ends with the first error it sees
                caught, outcome = error, _Outcome(problem=f"{type(error).__name__}: {error}")
        box = [outcome]
        dist.broadcast_object_list(box, src=0)
        if caught is not None:
            raise caught
        received = box[0]
        assert received is not None, "the first rank sends an outcome"
        if received.problem is not None:
            raise OtherRankError(f"rank 0 failed: {received.problem}")
        return received.result  # type: ignore[return-value]


@dataclass(frozen=True)
class _Outcome(Generic[Result]):
    result: Result | None = None
    problem: str | None = None


class OtherRankError(RuntimeError):
    """Another rank failed, has said so itself, and this one cannot go on."""


class RanksNotStartedError(RuntimeError):
    """What started this process, or this machine, does not give the ranks asked for."""


class RankFailedError(RuntimeError):
    """The run failed on this rank, one of several processes.

    The process must not go on: others may wait for it. `__cause__` is what was raised.

    Attributes:
        speaks: Whether this rank has to print the text. Others say the same already if not.
        is_fault: Whether the program itself is to blame, and a traceback of use.
    """

    def __init__(self, text: str, *, speaks: bool, is_fault: bool = False) -> None:
        super().__init__(text)
        self.speaks = speaks
        self.is_fault = is_fault


def run_on_ranks(
    program: Callable[[Ranks], Result],
    sizes: ParallelSizes,
    *,
    num_expert_heads: int | Callable[[], int] | None = None,
    simulate: int | None = None,
    device: str | None = None,
    backend: str | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> Result:
    """Run `program(ranks)` on every rank.

    Args:
        program: Calls the same collectives on every rank.
        sizes: How the ranks divide the work.
        num_expert_heads: Heads of the expert mixture, which decide an expert size of None. A
            function is called on every rank, and may raise on all of them as program may.
        simulate: Ranks to simulate in this process; None for those that torchrun or mpirun
            started, for the default group of torch.distributed if there is one, else one rank.
        device: "cpu", "cuda" or "musa"; None for what the machine has.
        backend: Of torch.distributed; None for the one that fits.
        timeout: How long a rank waits for others.

    Returns:
        What the program returned on this rank; of simulated ranks, on the first.

    Raises:
        ValueError: If sizes do not fit the ranks, or program raises it.
        RanksNotStartedError: If the ranks cannot be started.
        RankFailedError: On several processes: whatever the program raises, wrapped.
    """
    if simulate is not None:
        return _run_simulated(program, sizes, num_expert_heads, simulate, device)
    if dist.is_initialized():
        place = hardware.device_for_rank(_local_rank(), device)
        started = Ranks(
            device=place, rank=dist.get_rank(), world_size=dist.get_world_size(), launcher="caller"
        )
        return _run_real(program, sizes, num_expert_heads, started)
    try:
        launch = init_distributed(backend, device=device, timeout=timeout)
    except RuntimeError as error:
        raise RanksNotStartedError(str(error)) from error
    started = Ranks(
        device=launch.device,
        rank=launch.rank,
        world_size=launch.world_size,
        launcher=launch.launcher,
    )
    try:
        result = _run_real(program, sizes, num_expert_heads, started)
    except BaseException:
        # With others in it, ending the group could wait for a rank that is gone.
        if launch.world_size == 1:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()
    return result


def _run_simulated(
    program: Callable[[Ranks], Result],
    sizes: ParallelSizes,
    num_expert_heads: int | Callable[[], int] | None,
    world_size: int,
    device: str | None,
) -> Result:
    if world_size < 1:
        raise ValueError(f"simulate={world_size}: expected a positive number of ranks.")
    sizes.ulysses_of(world_size)
    place = hardware.device_for_rank(0, device)
    hardware.use_device(place)

    def body() -> Result:
        started = Ranks(
            device=place, rank=dist.get_rank(), world_size=world_size, launcher="simulated"
        )
        return program(_with_topology(started, sizes, num_expert_heads))

    return simulate_world(world_size, body).results[0]


def _run_real(
    program: Callable[[Ranks], Result],
    sizes: ParallelSizes,
    num_expert_heads: int | Callable[[], int] | None,
    started: Ranks,
) -> Result:
    try:
        return program(_with_topology(started, sizes, num_expert_heads))
    except BaseException as error:
        if started.world_size == 1:
            raise
        raise _failure(error, started.rank, started.world_size) from error


def _with_topology(
    started: Ranks, sizes: ParallelSizes, num_expert_heads: int | Callable[[], int] | None
) -> Ranks:
    if started.launcher != "simulated":
        # Ranks that made other groups than the rest would wait for them.
        facts = {f"{name} parallel size": str(v) for name, v in dataclasses.asdict(sizes).items()}
        check_alike(facts, started.world_size)
    ulysses = sizes.ulysses_of(started.world_size)
    if callable(num_expert_heads):
        num_expert_heads = num_expert_heads()
    if started.world_size == 1:
        return started
    shape: tuple[int, ...] = (ulysses,)
    names: tuple[str, ...] = ("sequence",)
    if sizes.cfg > 1:
        shape, names = (sizes.cfg, *shape), ("cfg", *names)
    topology = Topology.of_mesh(
        init_device_mesh(started.device.type, shape, mesh_dim_names=names),
        cfg="cfg" if sizes.cfg > 1 else None,
        expert_size=sizes.expert,
        num_expert_heads=num_expert_heads,
    )
    return dataclasses.replace(started, topology=topology)


def _failure(error: BaseException, rank: int, world_size: int) -> RankFailedError:
    """Tell the other ranks of a failure, and say what this rank knows about it."""
    own = _explain(error)
    if isinstance(error, OtherRankError):
        return RankFailedError(own, speaks=False)
    if isinstance(error, UnlikeRanksError):
        # All have it, and need not ask a store that may have gone with its rank.
        return RankFailedError(f"rank {rank} of {world_size}: {own}", speaks=rank == 0)
    first_rank, first = _publish(rank, own)
    if first_rank == rank:
        return RankFailedError(
            f"rank {rank} of {world_size}: {own}", speaks=True, is_fault=_is_fault(error)
        )
    if first == own:
        return RankFailedError(f"rank {rank} of {world_size}: {own}", speaks=False)
    return RankFailedError(
        f"rank {rank} of {world_size}: stopped, because rank {first_rank} failed: {first}",
        speaks=True,
    )


def _explain(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    if _is_lost_peer(error):
        return f"another rank is gone, killed perhaps, or out of memory ({text})"
    if isinstance(error, RuntimeError) and "timed out" in text.lower():
        return f"another rank did not answer before the timeout, it hangs perhaps ({text})"
    return text if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {text}"


def _is_fault(error: BaseException) -> bool:
    # RuntimeError and MemoryError: of the machine and its libraries, with a text of their own.
    known = (ValueError, OSError, RuntimeError, MemoryError, KeyboardInterrupt, ModuleNotFoundError)
    return not isinstance(error, known)


def _is_lost_peer(error: BaseException) -> bool:
    # Gloo's errors have no class of their own.
    return isinstance(error, dist.DistNetworkError) or (
        isinstance(error, RuntimeError) and "by peer" in str(error)
    )


def _publish(rank: int, text: str) -> tuple[int, str]:
    """Note the first failure of all ranks in their store; return whose it is, and its text."""
    # The default group's store has no public name; every group was made through it.
    from torch.distributed.distributed_c10d import _get_default_store

    said = f"{rank} {text}"
    with contextlib.suppress(RuntimeError, ValueError):
        # Gone with its rank, the store cannot be asked: then this rank speaks for itself.
        store = _get_default_store()
        store.set_timeout(_STORE_PATIENCE)
        said = store.compare_set(_FAILURE_KEY, "", said).decode()
    number, _, text = said.partition(" ")
    return int(number), text


def _local_rank() -> int:
    given = os.environ.get("LOCAL_RANK", "")
    return int(given) if given.isdecimal() else dist.get_rank()
