"""What this machine offers, what would be chosen and why, and whether a small exchange works.

    python -m ulysses_comm.doctor            every transport that can be tried from one process
    mpirun -n 4 python -m ulysses_comm.doctor       the ranks that were started, likewise torchrun

Needs torch alone; `python -m ulysses_comm doctor` is the same.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TextIO, cast

import torch
import torch.distributed as dist

from ulysses_comm import hardware
from ulysses_comm.bootstrap import Launch, detect_launcher, init_distributed
from ulysses_comm.exchange import scatter_heads_gather_seqlen, scatter_seqlen_gather_heads
from ulysses_comm.findings import choices, facts, version
from ulysses_comm.mpi import BACKEND as MPI_BACKEND
from ulysses_comm.mpi import Launcher, find_launcher, load_mpi
from ulysses_comm.simulate import simulate
from ulysses_comm.symmetric.choice import (
    check_wish,
    choice_on_this_machine,
    use_transport,
)
from ulysses_comm.testing import RankOutcome, RanksFailedError, run_gloo_ranks

_MOST_GPUS = 8

# Of what a failed exchange says: enough for the first error of every rank.
_MOST_LINES, _MOST_COLUMNS = 20, 240

_HEADS_PER_RANK, _HEAD_DIM = 2, 16


@dataclass(frozen=True)
class Check:
    """One small exchange: passed, failed, or (`passed` is None) not tried, and why."""

    name: str
    passed: bool | None
    detail: str


@dataclass(frozen=True)
class Report:
    """What the doctor found.

    Attributes:
        facts: (what, what was found), in the order to print.
        choices: (what, the choice and its reason).
        checks: The exchanges that were tried.
    """

    facts: list[tuple[str, str]]
    choices: list[tuple[str, str]]
    checks: list[Check]

    @property
    def passed(self) -> bool:
        """Whether no exchange failed."""
        return all(check.passed is not False for check in self.checks)


def run(*, timeout: float = 60.0) -> Report:
    """Examine this machine.

    Args:
        timeout: Seconds that each small exchange may take, starting its processes included.

    Returns:
        The findings. On ranks that torchrun or mpirun started each rank takes part in the exchange
        and gets a report; elsewhere the doctor starts ranks itself. What keeps the started ranks
        from working is a finding too.
    """
    try:
        check_wish("auto")  # the environment's, which decides in every exchange
        launcher = detect_launcher(os.environ)
        if launcher == "bare":
            return Report(facts(), choices(None), _try_each_transport(timeout))
        launch = init_distributed(timeout=timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as error:
        return Report(facts(), choices(None), [Check("starting the ranks", False, str(error))])
    try:
        return Report(facts(), choices(launch), [_try_started_ranks(launch)])
    finally:
        dist.destroy_process_group()


def check_exchange(group: dist.ProcessGroup, device: torch.device) -> None:
    """Exchange small tensors both ways on the ranks of a group and compare every bit.

    Raises:
        RuntimeError: If something arrives wrong.
    """
    rank, world_size = group.rank(), group.size()
    for dtype in (torch.float32, torch.bfloat16):
        # The first rank owns no tokens, the others 1, 2, 3, ...; a lone rank owns three.
        splits = list(range(world_size)) if world_size > 1 else [3]
        shape = (sum(splits), world_size * _HEADS_PER_RANK, _HEAD_DIM)
        generator = torch.Generator().manual_seed(0)
        whole = torch.randint(-200, 200, shape, generator=generator).to(dtype)
        mine = whole.split(splits)[rank].to(device)
        heads = slice(rank * _HEADS_PER_RANK, (rank + 1) * _HEADS_PER_RANK)
        (gathered,) = scatter_heads_gather_seqlen([mine], splits, group)
        back = scatter_seqlen_gather_heads(gathered.contiguous(), splits, group)
        hardware.synchronize(device)
        for what, actual, expected in (
            ("scatter_heads_gather_seqlen", gathered.cpu(), whole[:, heads]),
            ("scatter_seqlen_gather_heads", back.cpu(), mine.cpu()),
        ):
            if not torch.equal(actual, expected):
                raise RuntimeError(
                    f"{what} of {dtype} on {device} with splits {splits}: rank {rank} received "
                    f"{int((actual != expected).sum())} wrong elements out of {expected.numel()}."
                )


def render(report: Report) -> str:
    """Return the report as text, one line for each finding."""
    width = max(len(what) for what, _ in report.facts + report.choices)
    lines = ["This machine", *(f"  {what:<{width}}  {found}" for what, found in report.facts)]
    lines += ["Chosen", *(f"  {what:<{width}}  {found}" for what, found in report.choices)]
    lines.append("A small exchange")
    words = {True: "pass", False: "FAIL", None: "skip"}
    for check in report.checks:
        first, *rest = [line[:_MOST_COLUMNS] for line in check.detail.splitlines()[:_MOST_LINES]]
        lines.append(f"  {words[check.passed]}  {check.name}: {first}")
        lines += [f"        {line}" for line in rest]
    lines.append("All that was tried works." if report.passed else "Something does not work.")
    return "\n".join(lines)


def print_report(report: Report, file: TextIO | None = None) -> None:
    """Write the report to a file, standard output by default."""
    (file or sys.stdout).write(render(report) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status: 0 if nothing failed, 1 if something did."""
    parser = argparse.ArgumentParser(prog="doctor", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds for each exchange")
    options = parser.parse_args(arguments)
    if not (math.isfinite(options.timeout) and options.timeout > 0):
        parser.error(f"--timeout {options.timeout:g}: expected a positive number of seconds")
    report = run(timeout=options.timeout)
    if _speaks():
        print_report(report)
    return 0 if report.passed else 1


def _speaks() -> bool:
    """Whether this process is the one that prints: rank 0, or one that is in no world of ranks."""
    try:
        launcher = detect_launcher(os.environ)
        if launcher == "mpirun":
            return int(load_mpi().COMM_WORLD.rank) == 0
    except RuntimeError:
        return True
    return launcher == "bare" or os.environ["RANK"] == "0"


# Exchanges


def _try_started_ranks(launch: Launch) -> Check:
    name = f"{launch.backend.name}, {launch.world_size} rank(s) on {launch.device.type}"
    group = dist.group.WORLD
    assert group is not None, "init_distributed makes the default group"
    return _attempt(name, lambda: check_exchange(group, launch.device))


def _try_each_transport(timeout: float) -> list[Check]:
    cpu = torch.device("cpu")
    checks = [
        _attempt(
            "simulated ranks, 3 in this process",
            lambda: simulate(3, lambda group: check_exchange(group, cpu)),
        )
    ]
    if hardware.backend_problems("gloo"):
        checks.append(Check("gloo", None, hardware.backend_problems("gloo")[0]))
        return checks
    checks.append(
        _attempt(
            "gloo, 2 processes",
            lambda: run_gloo_ranks(2, _check_on_cpu, timeout=timeout, group_timeout=timeout),
        )
    )
    checks += [_try_gpus(kind, timeout) for kind in hardware.ACCELERATORS]
    checks.append(_try_symmetric_memory(timeout))
    return [*checks, _try_mpirun(find_launcher(), timeout)]


def _try_gpus(kind: str, timeout: float) -> Check:
    count = min(hardware.device_count(cast(hardware.DeviceKind, kind)), _MOST_GPUS)
    name = {"cuda": "nccl", "musa": "mccl"}[kind]
    if not count:
        return Check(name, None, f"torch sees no {kind} device")
    problems = hardware.backend_problems(name)
    if problems:
        return Check(name, None, problems[0])
    return _attempt(
        f"{name}, {count} process(es) on {kind}",
        lambda: run_gloo_ranks(
            count, _check_on_gpus, kind, name, timeout=timeout, group_timeout=timeout
        ),
    )


def _try_symmetric_memory(timeout: float) -> Check:
    choice = choice_on_this_machine()
    if choice.name != "symm_mem":
        return Check("symm_mem", None, choice.reason)
    count = min(hardware.device_count("cuda"), _MOST_GPUS)
    return _attempt(
        f"symm_mem, {count} process(es) on cuda",
        lambda: run_gloo_ranks(
            count, _check_on_gpus, "cuda", "nccl", True, timeout=timeout, group_timeout=timeout
        ),
    )


def _check_on_cpu(group: dist.ProcessGroup) -> None:
    check_exchange(group, torch.device("cpu"))


def _check_on_gpus(
    group: dist.ProcessGroup, kind: str, backend: str, symmetric: bool = False
) -> None:
    device = hardware.device_for_rank(group.rank(), kind)
    hardware.use_device(device)
    gpu_group = dist.new_group(backend=backend)
    assert gpu_group is not None, "every rank is a member"
    # On one GPU the exchange below communicates nothing; this starts the backend all the same.
    total = torch.ones(1, device=device)
    dist.all_reduce(total, group=gpu_group)
    if float(total) != group.size():
        raise RuntimeError(f"all_reduce of ones over {group.size()} rank(s) gave {float(total):g}.")
    if symmetric:
        use_transport(gpu_group, "symm_mem")
    check_exchange(gpu_group, device)


def _try_mpirun(launcher: Launcher | None, timeout: float) -> Check:
    if launcher is None:
        return Check(MPI_BACKEND, None, "no mpirun beside this Python or on the PATH")
    if version("mpi4py") is None:
        return Check(MPI_BACKEND, None, "mpi4py is not installed: pip install 'ulysses-comm[mpi]'")

    def launch() -> None:
        command = [sys.executable, "-m", "ulysses_comm.doctor", "--timeout", str(timeout)]
        done = subprocess.run(
            launcher.command(2, command),
            env={
                **os.environ,
                hardware.DEVICE_VARIABLE: "cpu",
                "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            },
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if done.returncode:
            raise RuntimeError(
                f"exit code {done.returncode}\n{(done.stdout + done.stderr)[-2000:]}"
            )

    return _attempt(f"{MPI_BACKEND}, mpirun -n 2", launch)


def _attempt(name: str, action: Callable[[], object]) -> Check:
    start = time.perf_counter()
    try:
        action()
    except RanksFailedError as error:
        lost = [outcome for outcome in error.outcomes if not outcome.passed]
        return Check(name, False, "\n".join(_in_short(outcome) for outcome in lost))
    except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
        return Check(name, False, f"{type(error).__name__}: {error}")
    return Check(name, True, f"{time.perf_counter() - start:.2f} s")


def _in_short(outcome: RankOutcome) -> str:
    if not outcome.error:
        return outcome.describe()
    first_line = outcome.message.partition("\n")[0]
    return f"rank {outcome.rank}: {outcome.error_types[0]}: {first_line}"


if __name__ == "__main__":
    sys.exit(main())
