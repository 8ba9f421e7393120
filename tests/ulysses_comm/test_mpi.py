"""MPI ranks: what `mpi_checks` and `mpi_faults` do on them, started by a real mpirun."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ulysses_comm.mpi import Launcher, find_launcher, load_mpi
from ulysses_comm.mpi.launcher import _identify

LAUNCHER = find_launcher()
MISSING = (
    "needs mpirun, such as pip install mpich"
    if LAUNCHER is None
    else "needs mpi4py: pip install mpi4py"
    if importlib.util.find_spec("mpi4py") is None
    else ""
)
needs_mpi = pytest.mark.skipif(bool(MISSING), reason=MISSING)
ROOT = Path(__file__).parents[2]

TIMEOUT = 3.0  # of the groups in mpi_faults
SLACK = 2.0  # ranks share cores with other tests


def mpirun(num_ranks: int, *arguments: str, limit: float = 240.0) -> subprocess.CompletedProcess:
    assert LAUNCHER is not None
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        LAUNCHER.command(num_ranks, [sys.executable, *arguments]),
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=limit,
    )


@needs_mpi
@pytest.mark.mpi
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_check_passes_on_mpi_ranks(num_ranks: int, tmp_path: Path) -> None:
    done = mpirun(num_ranks, "-m", "tests.ulysses_comm.mpi_checks", str(tmp_path))
    reports = [
        json.loads(path.read_text()) if path.exists() else {"start": "no report"}
        for path in (tmp_path / f"rank-{rank}.json" for rank in range(num_ranks))
    ]
    failed = [
        f"rank {rank}, {check}:\n{outcome}"
        for rank, report in enumerate(reports)
        for check, outcome in report.items()
        if outcome != "passed"
    ]
    assert not failed, "\n".join(failed) + done.stderr[-2000:]
    assert done.returncode == 0, done.stderr[-2000:]
    assert min(len(report) for report in reports) >= 24


def lose_a_rank(name: str, folder: Path, *backend: str) -> tuple[list[dict[str, Any]], float, Any]:
    """Run a scenario; return the errors of ranks 0 and 2, seconds until the end, and the rest."""
    done = mpirun(3, "-m", "tests.ulysses_comm.mpi_faults", str(folder), name, *backend, limit=60)
    ended = time.time()
    started = [folder / f"started-{rank}" for rank in range(3)]
    assert all(path.exists() for path in started), done.stderr[-2000:]
    seconds = ended - max(path.stat().st_mtime for path in started)
    errors = [folder / f"rank-{rank}.json" for rank in (0, 2)]
    return [json.loads(path.read_text()) for path in errors if path.exists()], seconds, done


@needs_mpi
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("name", "backend"), [("killed", "ulysses_mpi"), ("raises", "ulysses_mpi"), ("raises", "gloo")]
)
def test_a_rank_that_ends_ends_the_job_at_once(name: str, backend: str, tmp_path: Path) -> None:
    """mpirun ends the others of a killed rank; one that raises ends them itself."""
    _, seconds, done = lose_a_rank(name, tmp_path, backend)
    assert done.returncode != 0
    assert seconds < TIMEOUT + SLACK
    if name == "raises":
        assert "the odd rank's own trouble" in done.stderr


@needs_mpi
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing", ["did not complete within 3 s", "MPI group that failed", "cannot withdraw"]),
        ("makes_no_group", ["rank(s) [1] out of [0, 1, 2]", "within 3 s"]),
    ],
)
def test_a_rank_that_stays_away_is_an_error_within_the_timeout(
    name: str, words: list[str], tmp_path: Path
) -> None:
    errors, seconds, done = lose_a_rank(name, tmp_path)
    assert len(errors) == 2, done.stderr[-2000:]
    for error in errors:
        assert error["type"] in ("DistBackendError", "RuntimeError")
        assert [word for word in words if word not in error["text"]] == [], error["text"]
        assert TIMEOUT - 0.5 < error["seconds"] < TIMEOUT + SLACK
    # The rank that slept for two minutes was ended too.
    assert done.returncode != 0
    assert seconds < TIMEOUT + 2.0 + 3 * SLACK


@needs_mpi
@pytest.mark.mpi
@pytest.mark.long
@pytest.mark.parametrize("row", [1, 4096])
def test_more_than_2_gib_to_one_rank(row: int) -> None:
    program = f"""
import torch, torch.distributed as dist
from ulysses_comm.bootstrap import init_distributed
rank = init_distributed().rank
rows = (2**31 + 2**20) // {row}
send = torch.full((rows * (rank == 0), {row}), 7, dtype=torch.uint8)
output = torch.zeros((rows * (rank == 1), {row}), dtype=torch.uint8)
dist.all_to_all_single(output, send, [rows * (rank == 1), 0], [0, rows * (rank == 0)])
assert rank == 0 or bool((output == 7).all())
dist.destroy_process_group()
"""
    done = mpirun(2, "-c", program)
    assert done.returncode == 0, done.stderr[-2000:]


def test_importing_starts_no_mpi() -> None:
    program = (
        "import sys, ulysses_comm.mpi, ulysses_comm.bootstrap, ulysses_comm.hardware\n"
        "loaded = {'mpi4py', 'torchada', 'torch_musa', 'ulysses_comm.mpi.channel'}\n"
        "assert not loaded & set(sys.modules), loaded & set(sys.modules)\n"
        "import torch.distributed as dist\n"
        "assert 'ulysses_mpi' not in dist.Backend.backend_list"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT, timeout=120)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ImportError("No module named 'mpi4py'"), ["ulysses-comm[mpi]", "does not import"]),
        (RuntimeError("cannot load MPI library"), ["pip install mpich", "cannot start"]),
    ],
)
def test_missing_mpi_says_what_to_install(
    error: Exception, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def find_spec(self, name: str, *_: Any) -> None:
            if name.startswith("mpi4py"):
                raise error

    for name in [name for name in sys.modules if name.startswith("mpi4py")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(RuntimeError) as caught:
        load_mpi()
    assert [word for word in (*words, str(error)) if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("says", "kind", "flags"),
    [
        ("mpirun (Open MPI) 5.0.11", "openmpi", True),
        ("HYDRA build details:\n    Version:      5.0.2", "mpich", False),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13", "other", False),
    ],
)
def test_flags_follow_the_kind_of_mpirun(says: str, kind: str, flags: bool, tmp_path: Path) -> None:
    path = tmp_path / "mpirun"
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{says}\nEND\n")
    path.chmod(0o755)
    launcher = _identify(str(path))
    assert launcher.kind == kind
    assert launcher.version.split()[-1] in says
    command = launcher.command(3, ["python", "x.py"])
    assert command[0] == str(path)
    assert command[-4:] == ["-n", "3", "python", "x.py"]
    assert ("--oversubscribe" in command) == flags


def test_a_broken_mpirun_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mpirun"
    path.write_text("no program")
    launcher: Launcher = _identify(str(path))
    assert launcher.kind == "other"
    assert "failed" in launcher.version
