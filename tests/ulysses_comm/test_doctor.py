"""The doctor: what it finds and says, and that it tells a sick transport from a well one."""

from __future__ import annotations

import importlib.util
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ulysses_comm import doctor, hardware
from ulysses_comm.doctor import Check, Report, check_exchange
from ulysses_comm.mpi import find_launcher
from ulysses_comm.simulate import simulate

ROOT = Path(__file__).parents[2]
STUB = ROOT / "tests" / "musa_stub"
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")


def run_doctor(
    *arguments: str,
    module: str = "ulysses_comm.doctor",
    launcher: list[str] | None = None,
    path: Path | None = None,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
    places = [str(ROOT), *([str(path)] if path else [])]
    environment = {**clean, "PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*(launcher or []), sys.executable, "-W", "ignore", "-m", module, *arguments],
        env={**environment, **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
    )


@pytest.mark.gloo
def test_every_transport_is_tried_and_named() -> None:
    """Through the command line, with the one that the demo extra brings."""
    importlib.util.find_spec("typer") or pytest.skip("needs typer: pip install typer")
    done = run_doctor("doctor", "--timeout", "90", module="ulysses_comm", ULYSSES_COMM_DEVICE="cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    text = done.stdout
    for line in (
        f"torch         {torch.__version__}",
        "device        cpu: ULYSSES_COMM_DEVICE in the environment asked for it",
        "backend       gloo: ",
        "environment   ULYSSES_COMM_DEVICE=cpu",
        "layouts       head shards for inputs and output",
        "pass  simulated ranks, 3 in this process: ",
        "pass  gloo, 2 processes: ",
        "All that was tried works.",
    ):
        assert line in text, text
    if importlib.util.find_spec("mpi4py") and find_launcher():
        assert "pass  ulysses_mpi, mpirun -n 2: " in text
    if not hardware.device_count("musa"):
        assert "skip  mccl: torch sees no musa device" in text


@pytest.mark.gloo
def test_sick_gpus_are_a_failure_with_its_reason() -> None:
    """On the stand-in for a MUSA machine nothing can be put on a GPU."""
    done = run_doctor("--timeout", "60", path=STUB, STUB_MUSA_DEVICES="2", PATH="")
    assert done.returncode == 1, done.stdout + done.stderr
    text = done.stdout
    for line in (
        "built for MUSA 5.2.0",
        "device        musa: torch sees 2 musa device(s)",
        "backend       mccl: MCCL carries",
        "pass  gloo, 2 processes: ",
        "FAIL  mccl, 2 process(es) on musa: rank 0: NotImplementedError",
        "        rank 1: NotImplementedError",
        "Something does not work.",
    ):
        assert line in text, text
    assert max(map(len, text.splitlines())) < 400


@pytest.mark.gloo
def test_ranks_of_torchrun_exchange_and_one_of_them_speaks() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                "--nproc-per-node=2", "--no-python"]  # fmt: skip
    done = run_doctor(launcher=launcher, ULYSSES_COMM_DEVICE="cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("pass  gloo, 2 rank(s) on cpu: ") == 1, done.stdout
    assert "2 rank(s), started by torchrun" in done.stdout


def test_a_start_that_cannot_work_is_a_finding() -> None:
    done = run_doctor(RANK="1", WORLD_SIZE="2")
    assert done.returncode == 1
    assert "FAIL  starting the ranks: torch.distributed cannot start:" in done.stdout
    assert "MASTER_ADDR is not set" in done.stdout
    assert "This machine" in done.stdout


def test_doctor_needs_no_typer() -> None:
    program = (
        "import runpy, sys\n"
        "sys.modules['typer'] = sys.modules['rich'] = None\n"
        "from ulysses_comm import doctor\n"
        "doctor.main = lambda arguments: print('the doctor,', arguments) or 0\n"
        "sys.argv = ['ulysses_comm', 'doctor', '--timeout', '5']\n"
        "runpy.run_module('ulysses_comm', run_name='__main__')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "the doctor, ['--timeout', '5']\n"


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_small_exchange_passes_on_ranks_that_work(world_size: int) -> None:
    simulation = simulate(world_size, lambda group: check_exchange(group, torch.device("cpu")))
    if world_size > 1:
        assert len(simulation.traffic) == 4, "two exchanges of two dtypes"


def test_small_exchange_notices_one_wrong_element(monkeypatch: pytest.MonkeyPatch) -> None:
    real = dist.all_to_all_single

    def spoils_one(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        work = real(output, *args, **kwargs)
        output.view(-1)[-1:] += 1
        return work

    monkeypatch.setattr(dist, "all_to_all_single", spoils_one)
    with pytest.raises(RuntimeError, match=r"torch\.float32 on cpu .* received 1 wrong elements"):
        simulate(2, lambda group: check_exchange(group, torch.device("cpu")))


def test_report_says_pass_fail_and_skip() -> None:
    long = "\n".join(["first", *["x" * 500] * 50])
    report = Report(
        [("torch", "2.13")],
        [("device", "cpu: why")],
        [Check("a", True, "0.1 s"), Check("b", None, "absent"), Check("c", False, long)],
    )
    assert not report.passed
    assert Report([], [], report.checks[:2]).passed
    file = io.StringIO()
    doctor.print_report(report, file)
    lines = file.getvalue().splitlines()
    assert lines[:6] == [
        "This machine",
        "  torch   2.13",
        "Chosen",
        "  device  cpu: why",
        "A small exchange",
        "  pass  a: 0.1 s",
    ]
    assert lines[6:8] == ["  skip  b: absent", "  FAIL  c: first"]
    assert lines[-1] == "Something does not work."
    assert len(lines) < 40
    assert max(map(len, lines)) < 260


def test_missing_mpi_is_a_skip_with_its_reason() -> None:
    check = doctor._try_mpirun(None, 1.0)
    assert (check.name, check.passed) == ("ulysses_mpi", None)
    assert "no mpirun" in check.detail


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_a_timeout_that_is_none_is_a_usage_error(
    seconds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Zero seconds read as ranks that "died with exit code 0"; nan ended in a traceback."""
    with pytest.raises(SystemExit) as caught:
        doctor.main([f"--timeout={seconds}"])
    assert caught.value.code == 2
    assert "--timeout" in capsys.readouterr().err
