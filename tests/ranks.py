"""Run a function on n real processes, over a temporary file, with results and errors back.

    results = run_ranks(function, 4, argument, ...)         # function(group, argument, ...)
    outcomes = rank_outcomes(function, 4, argument, ...)    # the same, errors and deaths as values

`function` must be importable (module level). The processes are forked from one server that has
torch imported already, so that a run costs about a second rather than the import of torch n times.
No port is used: the ranks meet in a file of a temporary folder. Ranks that are not over in time say
where they are, and are killed; the run says which they were. They talk through gloo unless told
otherwise; with `backend="nccl"` each has the GPU of its number.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import multiprocessing
import multiprocessing.connection
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# Ranks wait at most this long for one another inside the backend: above every timeout that a test
# gives the library, below the time after which the parent kills.
GLOO_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class RankError:
    """An exception that a rank's function raised."""

    types: list[str]  # names of the exception's class and of its bases
    message: str
    traceback: str


@dataclass(frozen=True)
class Outcome:
    """How a rank ended: with a result, an error, or without a word (`exit_code` says how)."""

    rank: int
    result: Any
    error: RankError | None
    exit_code: int | None  # negative: the signal that killed it; None: this parent had to
    seconds: float  # in the function, without start and end

    @property
    def answered(self) -> bool:
        """Whether it returned or raised, rather than died or hung."""
        return self.exit_code == 0


def rank_outcomes(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    environment: Mapping[str, str] | None = None,
    meet: str = "file",
    backend: str = "gloo",
    group_timeout: timedelta = GLOO_TIMEOUT,
) -> list[Outcome]:
    """Run `function(group, *args)` on `world_size` ranks and return how each one ended.

    Args:
        function: A module-level function; gets the default process group first.
        world_size: Number of processes.
        *args: Further arguments, anything that can be pickled.
        timeout: Seconds until the ranks that are still running are killed.
        environment: Variables set in each rank before the function is imported.
        meet: "file" for a FileStore, "tcp" for a TCPStore on a port that the system chose.
        backend: Of torch.distributed: "gloo", or "nccl" with a GPU for each rank.
        group_timeout: How long ranks wait for one another inside the backend.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "tests.ranks"])
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        processes, pipes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(theirs, rank, world_size, folder, meet, dict(environment or {})),
                kwargs={
                    "function": function,
                    "args": args,
                    "backend": backend,
                    "group_timeout": group_timeout,
                    "timeout": timeout,
                },
                daemon=True,
            )
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        return _collect(processes, pipes, time.monotonic() + timeout)


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, **kwargs: Any) -> list:
    """Run like `rank_outcomes` and return the results in rank order, or raise what went wrong."""
    outcomes = rank_outcomes(function, world_size, *args, **kwargs)
    reports = []
    for outcome in outcomes:
        if outcome.error is not None:
            reports.append(f"rank {outcome.rank} raised:\n{outcome.error.traceback}")
        elif outcome.exit_code is None:
            reports.append(f"rank {outcome.rank} did not end in time and was killed")
        elif outcome.exit_code != 0:
            reports.append(f"rank {outcome.rank} died with exit code {outcome.exit_code}")
    if reports:
        raise AssertionError("\n".join(reports))
    return [outcome.result for outcome in outcomes]


def _collect(
    processes: list[Any], pipes: list[multiprocessing.connection.Connection], deadline: float
) -> list[Outcome]:
    answers: dict[int, dict[str, Any]] = {}
    waiting = dict(enumerate(pipes))
    while waiting and time.monotonic() < deadline:
        ready = multiprocessing.connection.wait(
            list(waiting.values()), timeout=max(0.0, deadline - time.monotonic())
        )
        for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
            pipe = waiting.pop(rank)
            with contextlib.suppress(EOFError):  # the process is gone without an answer
                answers[rank] = torch.load(io.BytesIO(pipe.recv_bytes()), weights_only=False)
    exit_codes: list[int | None] = []
    for process in processes:
        process.join(max(0.0, min(10.0, deadline - time.monotonic())))
        exit_codes.append(process.exitcode)
        if process.exitcode is None:
            process.kill()
            process.join()
    return [
        Outcome(
            rank=rank,
            result=answers.get(rank, {}).get("result"),
            error=answers.get(rank, {}).get("error"),
            # A rank that answered and then idles in a torn-down backend has ended all the same.
            exit_code=0 if rank in answers else code,
            seconds=answers.get(rank, {}).get("seconds", float("nan")),
        )
        for rank, code in enumerate(exit_codes)
    ]


def _rank_main(
    pipe: multiprocessing.connection.Connection,
    rank: int,
    world_size: int,
    folder: str,
    meet: str,
    environment: dict[str, str],
    *,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    backend: str,
    group_timeout: timedelta,
    timeout: float,
) -> None:
    # A rank that is about to be killed for its time says where it is. It began after the clock did.
    faulthandler.dump_traceback_later(max(0.5 * timeout, timeout - 20))
    os.environ.update(environment)
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    fill_empty_with_nan()
    device = None
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        store=_store(rank, world_size, folder, meet),
        rank=rank,
        world_size=world_size,
        timeout=group_timeout,
        device_id=device,  # the communicator is made at once, and its GPU is known
    )
    answer: dict[str, Any] = {"result": None, "error": None}
    start = time.monotonic()
    try:
        answer["result"] = function(dist.group.WORLD, *args)
    except Exception as error:
        answer["error"] = RankError(
            types=[cls.__name__ for cls in type(error).__mro__],
            message=str(error),
            traceback=traceback.format_exc(),
        )
    answer["seconds"] = time.monotonic() - start
    buffer = io.BytesIO()
    torch.save(answer, buffer)
    pipe.send_bytes(buffer.getvalue())
    pipe.close()
    # No destroy_process_group and no interpreter shutdown: both may wait for peers that are gone.
    os._exit(0)


def _store(rank: int, world_size: int, folder: str, meet: str) -> dist.Store:
    if meet == "file":
        return dist.FileStore(os.path.join(folder, "store"), world_size)
    port_file = os.path.join(folder, "port")
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
        with open(port_file + ".new", "w") as file:
            file.write(str(store.port))
        os.replace(port_file + ".new", port_file)
        return store
    while not os.path.exists(port_file):
        time.sleep(0.01)
    with open(port_file) as file:
        return dist.TCPStore("127.0.0.1", int(file.read()), world_size, is_master=False)


def fill_empty_with_nan() -> None:
    """Make `torch.empty` give NaN (integers: their maximum), so that unwritten elements show."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
