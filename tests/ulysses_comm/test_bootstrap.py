"""Starting torch.distributed from torchrun, mpirun and nothing, and what is said when it cannot."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ulysses_comm.bootstrap import detect_launcher, init_distributed, launched_size
from ulysses_comm.mpi import find_launcher

ROOT = Path(__file__).parents[2]
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "4"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "1"}
LAUNCHER_VARIABLES = (*TORCHRUN, "LOCAL_RANK", *MPICH, *OPEN_MPI, "SLURM_STEP_NUM_TASKS",
                      "MV2_COMM_WORLD_SIZE", "ULYSSES_COMM_DEVICE")  # fmt: skip

PROGRAM = """
import json, os, sys
import torch, torch.distributed as dist
from ulysses_comm import scatter_seqlen_gather_heads
from ulysses_comm.bootstrap import init_distributed
before = dict(os.environ)
try:
    launch = init_distributed(**json.loads(sys.argv[2]))
except RuntimeError as error:
    path, report = f"error-{os.getpid()}", str(error)
else:
    assert os.environ == before, "the environment was written to"
    assert (dist.get_rank(), dist.get_world_size()) == (launch.rank, launch.world_size)
    splits = [2] * launch.world_size
    whole = torch.arange(sum(splits) * launch.world_size * 4.0).view(sum(splits), -1, 4)
    mine = whole[:, launch.rank : launch.rank + 1].contiguous()
    flat = scatter_seqlen_gather_heads(mine, splits, None, validate=True)
    assert torch.equal(flat, whole.split(splits)[launch.rank])
    path = f"rank-{launch.rank}"
    report = [launch.launcher, launch.world_size, launch.local_rank, str(launch.device),
              launch.backend.name, dist.get_backend()]
    dist.destroy_process_group()
open(os.path.join(sys.argv[1], path), "w").write(json.dumps(report))
"""


def clean_environment(extra: Mapping[str, str]) -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
    return {**environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **extra}


def run(
    folder: Path, command: list[str], extra: Mapping[str, str] | None = None, **arguments: str
) -> tuple[list[Any], list[str]]:
    """Run PROGRAM under a launcher; return the reports in rank order, and all errors."""
    script = folder / "program.py"
    script.write_text(PROGRAM)
    done = subprocess.run(
        [*command, str(script), str(folder), json.dumps(arguments)],
        env=clean_environment(extra or {}),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*"))]
    return reports, [json.loads(path.read_text()) for path in sorted(folder.glob("error-*"))]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        ({}, "bare"),
        (TORCHRUN, "torchrun"),
        (MPICH, "mpirun"),
        (OPEN_MPI, "mpirun"),
        ({"PMIX_RANK": "0"}, "mpirun"),
        ({**TORCHRUN, **MPICH}, "torchrun"),  # a wrapper set torch's variables from MPI's
        ({**TORCHRUN, "PMI_SIZE": "1"}, "torchrun"),  # torchrun inside a one-rank MPI job
        ({"WORLD_SIZE": "8", "MASTER_ADDR": "head", **MPICH}, "mpirun"),  # the container's
        ({"SLURM_STEP_NUM_TASKS": "1"}, "bare"),
    ],
)
def test_launcher_is_told_from_the_environment(variables: dict[str, str], launcher: str) -> None:
    assert detect_launcher(variables) == launcher


@pytest.mark.parametrize(
    ("variables", "size"),
    [
        ({}, 1),
        ({"WORLD_SIZE": "8"}, 1),  # of a container, perhaps: no launcher sets it alone
        (dict.fromkeys(("RANK", "MASTER_ADDR", "MASTER_PORT"), "0") | {"WORLD_SIZE": "8"}, 8),
        ({"PMI_SIZE": "3", "PMI_RANK": "0"}, 3),
        ({"PMIX_RANK": "0"}, 1),
    ],
)
def test_launchers_say_how_many_ranks_they_started(variables, size):
    assert launched_size(variables) == size


@pytest.mark.parametrize(
    ("variables", "named", "not_named"),
    [
        ({"RANK": "0"}, ["WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "RANK=0"], ["RANK is not"]),
        ({"LOCAL_RANK": "0"}, ["RANK is not set", "WORLD_SIZE", "MASTER_ADDR"], []),
        (
            {"WORLD_SIZE": "four", "RANK": "-1", "MASTER_PORT": "99999"},
            ["WORLD_SIZE is 'four'", "RANK is '-1'", "MASTER_PORT is '99999'", "MASTER_ADDR"],
            [],
        ),
        ({"RANK": "4", "WORLD_SIZE": "4"}, ["RANK=4 with WORLD_SIZE=4", "MASTER_ADDR"], []),
        ({**TORCHRUN, "PMI_SIZE": "3"}, ["WORLD_SIZE=4", "mpirun started 3", "launcher="], []),
        ({"SLURM_STEP_NUM_TASKS": "2"}, ["srun started 2 tasks", "--mpi=pmi2"], []),
    ],
)
def test_everything_missing_is_named_in_one_error(
    variables: dict[str, str], named: list[str], not_named: list[str]
) -> None:
    with pytest.raises(RuntimeError, match=r"torch\.distributed cannot start") as caught:
        detect_launcher(variables)
    text = str(caught.value)
    assert [word for word in named if word not in text] == [], text
    assert [word for word in not_named if word in text] == [], text
    assert "torchrun --nproc-per-node" in text
    assert "mpirun -n" in text


@pytest.mark.parametrize(
    ("arguments", "variables", "named"),
    [
        ({"backend": "ncll"}, {}, ["backend 'ncll' is unknown", "gloo", "ulysses_mpi"]),
        ({"backend": "mpi"}, {}, ["torch built with MPI", "use 'ulysses_mpi'"]),
        ({"backend": "mccl"}, {}, ["torch_musa"]),
        ({"device": "musa", "backend": "x"}, {}, ["'musa'", "sees none", "'x' is unknown"]),
        ({"backend": "nccl", "device": "cpu"}, {}, ["backend 'nccl'"]),
        ({"device": "tpu"}, {}, ["'tpu'", "expected cpu, cuda or musa"]),
        ({}, {"ULYSSES_COMM_DEVICE": "musa"}, ["ULYSSES_COMM_DEVICE in the environment"]),
        (
            {"launcher": "torchrun", "backend": "x"},
            {"RANK": "0", "LOCAL_RANK": "zero"},
            ["WORLD_SIZE is not set", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "'x' is unknown"],
        ),
    ],
)
def test_device_and_backend_problems_are_named_with_the_rest(
    arguments: dict[str, Any],
    variables: dict[str, str],
    named: list[str],
    environment: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        environment.setenv(name, value)
    with pytest.raises(RuntimeError, match=r"torch\.distributed cannot start") as caught:
        init_distributed(**arguments)
    text = str(caught.value)
    assert [word for word in named if word not in text] == [], text
    assert not dist.is_initialized()


def test_unknown_launcher_is_refused(environment: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'srun': expected 'torchrun', 'mpirun', 'bare' or None"):
        init_distributed(launcher="srun")  # type: ignore[arg-type]


def test_bare_program_is_a_lone_rank(environment: pytest.MonkeyPatch) -> None:
    launch = init_distributed(device="cpu")
    try:
        assert (launch.launcher, launch.rank, launch.world_size) == ("bare", 0, 1)
        assert dist.get_backend() == launch.backend.name == "gloo"
        with pytest.raises(RuntimeError, match="initialised already"):
            init_distributed()
    finally:
        dist.destroy_process_group()


def test_example_in_the_documentation_runs_bare() -> None:
    text = (ROOT / "docs" / "platforms.md").read_text()
    example = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)[0]
    done = subprocess.run(
        [sys.executable, "-c", example],
        env=clean_environment({"ULYSSES_COMM_DEVICE": "cpu"}),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("0 cpu gloo gloo comes with torch"), done.stdout
    assert "torch.Size([10, 4, 16])" in done.stdout


@pytest.mark.gloo
def test_torchrun_starts_gloo(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    reports, errors = run(tmp_path, command, device="cpu")
    assert not errors
    assert reports == [["torchrun", 2, rank, "cpu", "gloo", "gloo"] for rank in range(2)]


LAUNCHER = find_launcher()
needs_mpi = pytest.mark.skipif(
    LAUNCHER is None or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpirun and mpi4py, such as pip install mpi4py mpich",
)


def mpirun(num_ranks: int) -> list[str]:
    assert LAUNCHER is not None
    return LAUNCHER.command(num_ranks, [sys.executable])


@needs_mpi
@pytest.mark.mpi
@pytest.mark.gloo
@pytest.mark.parametrize(
    ("backend", "extra"), [("gloo", {"WORLD_SIZE": "7"}), ("ulysses_mpi", {"MASTER_PORT": "0"})]
)
def test_mpirun_starts_either_backend(backend: str, extra: dict[str, str], tmp_path: Path) -> None:
    reports, errors = run(tmp_path, mpirun(2), extra, device="cpu", backend=backend)
    assert not errors
    assert reports == [["mpirun", 2, rank, "cpu", backend, backend] for rank in range(2)]


@needs_mpi
@pytest.mark.mpi
def test_one_error_reaches_all_mpi_ranks(tmp_path: Path) -> None:
    reports, errors = run(
        tmp_path, mpirun(2), {"MASTER_PORT": "none"}, device="cpu", backend="gloo"
    )
    assert not reports
    assert len(errors) == 2
    problems = {text.partition("The environment has")[0] for text in errors}
    assert len(problems) == 1, problems
    assert "rank 0: it cannot open a store" in errors[0]
    assert "MASTER_PORT none" in errors[0]


@needs_mpi
@pytest.mark.mpi
def test_an_mpirun_of_another_mpi_is_noticed(tmp_path: Path) -> None:
    """Its ranks each see an MPI world of one: here there is no mpirun but its variables."""
    pretended = {"OMPI_COMM_WORLD_SIZE": "2"}
    reports, errors = run(tmp_path, [sys.executable], pretended, device="cpu")
    assert not reports
    assert "mpirun started 2 ranks" in errors[0]
    assert "another MPI" in errors[0]
