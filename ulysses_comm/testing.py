"""Ranks for test suites: N real gloo processes behind one call, beside the simulator's N in one.

The pytest fixtures `simulated_ranks` and `gloo_ranks` (module `ulysses_comm_pytest`, loaded by
pytest itself) hand these out; other test runners call them. docs/testing.md shows both.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from ulysses_comm.simulate import Simulation, simulate

# Seconds for what should take no time: to exit, or to raise after the group's timeout.
_GRACE = 2.0


class SimulatedRanks(Protocol):
    """Type of the fixture `simulated_ranks`: `simulate`, with a fixed seed unless told another."""

    def __call__(
        self, world_size: int, step: Callable[[Any], Any], *, seed: int | None = 0, **options: Any
    ) -> Simulation[Any]:
        """Run `step(group)` once per rank in this process."""
        ...


class GlooRanks(Protocol):
    """Type of the fixture `gloo_ranks`: `run_gloo_ranks`."""

    def __call__(
        self, world_size: int, function: Callable[..., Any], *args: Any, **options: Any
    ) -> list[Any]:
        """Run `function(group, *args)` on as many processes."""
        ...


@dataclass(frozen=True)
class RankOutcome:
    """How one rank's process ended.

    Attributes:
        rank: Which one.
        result: What its function returned.
        error: The traceback of what it raised; empty if it raised nothing.
        message: The text of what it raised.
        error_types: Names of the classes of what it raised, the most special first.
        exit_code: Of a process that died: negative for the signal that ended it. None for one that
            answered, or that had to be killed in the end.
        seconds: From the start of its function to the answer; inf if there was none.
    """

    rank: int
    result: Any = None
    error: str = ""
    message: str = ""
    error_types: tuple[str, ...] = ()
    exit_code: int | None = None
    seconds: float = float("inf")

    @property
    def passed(self) -> bool:
        """Whether the function returned."""
        return not self.error and self.seconds != float("inf")

    def describe(self) -> str:
        """Say what went wrong."""
        if self.error:
            return f"rank {self.rank} raised after {self.seconds:.2f} s:\n{self.error}"
        if self.exit_code is not None:
            return f"rank {self.rank} died with exit code {self.exit_code}, without a word"
        return f"rank {self.rank} was still running and was killed"


class RanksFailedError(RuntimeError):
    """Some ranks did not return; the text holds every one's traceback, the earliest first."""

    def __init__(self, outcomes: list[RankOutcome]) -> None:
        self.outcomes = outcomes
        failed = sorted((o for o in outcomes if not o.passed), key=lambda o: o.seconds)
        super().__init__("\n".join(outcome.describe() for outcome in failed))


def simulated_ranks(
    world_size: int, step: Callable[[Any], Any], *, seed: int | None = 0, **options: Any
) -> Simulation[Any]:
    """Run `step(group)` on simulated ranks, each with its own repeatable random numbers.

    Args:
        world_size: Number of ranks.
        step: What each rank does; may be a closure.
        seed: As for `simulate`, but 0 rather than None, so that a test repeats.
        **options: Passed on to `simulate`.

    Returns:
        The results in rank order, and the traffic.
    """
    return simulate(world_size, step, seed=seed, **options)


def run_gloo_ranks(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 120.0,
    group_timeout: float = 60.0,
    seed: int = 0,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run `function(group, *args)` on gloo processes of this machine and return what they returned.

    Args:
        world_size: Number of processes.
        function: Defined at module level, for each process imports it anew; gets the default group.
        *args: Further arguments; pickled.
        timeout: Seconds until processes that are still running are killed; sooner, soon after
            `group_timeout`, once one of them has raised or died.
        group_timeout: Seconds that a collective may wait for a rank, in each process.
        seed: torch's random seed in every process, the same in all.
        environment: Variables to set in each process before the function is imported, besides those
            of this process.

    Returns:
        The results in rank order; they travel through `torch.save`.

    Raises:
        ValueError: If `function` cannot be imported by another process, there is no rank, or a
            timeout is not a positive number.
        RanksFailedError: If a rank raises, dies or does not end in time; has every rank's outcome.

    The ranks meet in a temporary file, so that test runs beside one another need no ports. The
    first call takes as long as importing torch, later ones about a second.
    """
    for name, seconds in (("timeout", timeout), ("group_timeout", group_timeout)):
        if not (math.isfinite(seconds) and seconds > 0):
            raise ValueError(f"{name}={seconds}: expected a positive number of seconds.")
    if world_size < 1:
        raise ValueError(f"world_size={world_size}: expected one rank or more.")
    plan = _Plan(
        function=_Reference.to(function),
        args=pickle.dumps(args),
        group_timeout=timedelta(seconds=group_timeout),
        seed=seed,
        environment={**os.environ, **(environment or {})},
    )
    with tempfile.TemporaryDirectory(prefix="ulysses-comm-ranks-") as folder:
        outcomes = _run(plan, world_size, folder, time.monotonic() + timeout)
    if not all(outcome.passed for outcome in outcomes):
        raise RanksFailedError(outcomes)
    return [outcome.result for outcome in outcomes]


@dataclass(frozen=True)
class _Reference:
    """A function as another process finds it, also where its module has no importable name."""

    module: str
    name: str
    path: str | None

    @classmethod
    def to(cls, function: Callable[..., Any]) -> _Reference:
        name = getattr(function, "__qualname__", "")
        module = sys.modules.get(getattr(function, "__module__", ""))
        if module is None or getattr(module, name, None) is not function:
            raise ValueError(
                f"function is {function!r}: expected one defined at the level of its module, under "
                "its own name, for each rank is a process that imports it. Pass what it needs as "
                "arguments instead of closing over it."
            )
        return cls(module.__name__, name, getattr(module, "__file__", None))

    def resolve(self) -> Callable[..., Any]:
        module = sys.modules.get(self.module)
        if module is None and importlib.util.find_spec(self.module.partition(".")[0]) is not None:
            try:
                module = importlib.import_module(self.module)
            except ModuleNotFoundError as error:
                if error.name is None or not self.module.startswith(error.name):
                    raise
        # pytest imports test files under names that no path leads to, or that another file has.
        if module is None or (self.path and not _same_file(module.__file__, self.path)):
            assert self.path is not None, f"{self.module} has no file"
            spec = importlib.util.spec_from_file_location(self.module, self.path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[self.module] = module
            spec.loader.exec_module(module)
        function: Callable[..., Any] = getattr(module, self.name)
        return function


@dataclass(frozen=True)
class _Plan:
    """What every rank does."""

    function: _Reference
    args: bytes
    group_timeout: timedelta
    seed: int
    environment: dict[str, str]


def _same_file(one: str | None, other: str) -> bool:
    return one is not None and os.path.realpath(one) == os.path.realpath(other)


def _run(plan: _Plan, world_size: int, folder: str, deadline: float) -> list[RankOutcome]:
    # Forked from a server that has torch imported already, or, on Windows, started anew.
    methods = multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:
        context.set_forkserver_preload(["ulysses_comm.testing"])
    processes, pipes = [], []
    for rank in range(world_size):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank_main, args=(theirs, plan, rank, world_size, folder), daemon=True
        )
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    answers = _collect(pipes, deadline, plan.group_timeout.total_seconds() + _GRACE)
    codes = [_end(process) for process in processes]
    return [
        answers.get(rank) or RankOutcome(rank, exit_code=code) for rank, code in enumerate(codes)
    ]


def _collect(pipes: list[Connection], deadline: float, patience: float) -> dict[int, RankOutcome]:
    """Gather the answers until the deadline, or until `patience` seconds after a rank was lost."""
    answers: dict[int, RankOutcome] = {}
    waiting = dict(enumerate(pipes))
    while waiting and time.monotonic() < deadline:
        ready = multiprocessing.connection.wait(
            list(waiting.values()), timeout=max(0.0, deadline - time.monotonic())
        )
        for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
            pipe = waiting.pop(rank)
            # At the end of the file it is gone without an answer; the exit code says how.
            with contextlib.suppress(EOFError):
                answers[rank] = _load(pipe.recv_bytes())
            if rank not in answers or answers[rank].error:
                deadline = min(deadline, time.monotonic() + patience)
    return answers


def _end(process: Any) -> int | None:
    """Return the exit code of a process that answered or died; None if it has to be killed."""
    process.join(_GRACE)
    code: int | None = process.exitcode
    if code is None:
        process.kill()
        process.join()
    return code


def _rank_main(pipe: Connection, plan: _Plan, rank: int, world_size: int, folder: str) -> None:
    os.environ.clear()  # of the server's, which may have started under another environment
    os.environ.update(plan.environment)
    start = time.monotonic()
    try:
        function = plan.function.resolve()
        args = pickle.loads(plan.args)
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            store=FileStore(os.path.join(folder, "store"), world_size),
            rank=rank,
            world_size=world_size,
            timeout=plan.group_timeout,
        )
        torch.manual_seed(plan.seed)
        start = time.monotonic()
        result = function(dist.group.WORLD, *args)
        answer = _dump(RankOutcome(rank, result=result, seconds=time.monotonic() - start))
    except Exception as error:
        answer = _dump(
            RankOutcome(
                rank,
                error=traceback.format_exc(),
                message=str(error),
                error_types=tuple(cls.__name__ for cls in type(error).__mro__),
                seconds=time.monotonic() - start,
            )
        )
    sys.stdout.flush()
    sys.stderr.flush()
    pipe.send_bytes(answer)
    pipe.close()
    # Leaving in order would wait for peers that may be gone.
    os._exit(0)


def _dump(outcome: RankOutcome) -> bytes:
    buffer = io.BytesIO()
    torch.save(outcome, buffer)
    return buffer.getvalue()


def _load(answer: bytes) -> RankOutcome:
    outcome: RankOutcome = torch.load(io.BytesIO(answer), weights_only=False)
    return outcome
