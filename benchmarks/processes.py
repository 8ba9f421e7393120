"""Start a script once per rank on this machine, with a time limit and no launcher of its own.

    codes = run_script_on_ranks(Path(__file__), ["--part", "qkv"], world_size=2, seconds=90)

The ranks get torchrun's variables, so that the same script runs under torchrun too. Rank 0 writes
to this process's output, the others only their errors.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GRACE = 10.0  # seconds that the others have once one rank has failed


def run_script_on_ranks(
    script: Path | str,
    arguments: Sequence[str],
    *,
    world_size: int,
    seconds: float,
    environment: Mapping[str, str] | None = None,
) -> list[int | None]:
    """Run `python script arguments` on every rank and return the exit codes.

    Args:
        script: A file, or "-m name" for a module.
        arguments: For the script, the same on every rank.
        world_size: Number of processes.
        seconds: Until the processes that are still running are killed.
        environment: Variables beside those of this process.

    Returns:
        In rank order the exit code; None for a process that had to be killed.
    """
    shared = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.getenv("PYTHONPATH")])),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        **(environment or {}),
    }
    shared.setdefault("OMP_NUM_THREADS", "1")
    program = script.split() if isinstance(script, str) else [str(script)]
    processes = [
        subprocess.Popen(
            [sys.executable, *program, *arguments],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=None if rank == 0 else subprocess.DEVNULL,
        )
        for rank in range(world_size)
    ]
    return _wait(processes, time.monotonic() + seconds)


def failure_of(codes: Sequence[int | None]) -> str:
    """Say in words which ranks failed; empty if none did."""
    said = [
        f"rank {rank} {'was killed after the time limit' if code is None else f'exited {code}'}"
        for rank, code in enumerate(codes)
        if code != 0
    ]
    return ", ".join(said)


def free_port() -> int:
    """A port that the system says is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> list[int | None]:
    try:
        while any(process.poll() is None for process in processes):
            if any(process.poll() not in (None, 0) for process in processes):
                deadline = min(deadline, time.monotonic() + GRACE)
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return [process.poll() for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
