"""`magi2 generate`: flags, what it prints, and how it ends."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from magi2.checkpoint import load_checkpoint
from magi2.cli.app import app
from magi2.cli.progress import ConsoleProgress, _clock
from magi2.pipeline import generate
from tests.magi2 import runs
from tests.magi2.stopped_command import stop_at
from tests.ulysses_comm.test_mpi import mpirun, needs_mpi

ROOT = Path(__file__).parents[2]
SIZES = ["--width", "48", "--height", "32", "--num-frames", "5", "--num-inference-steps", "4"]
CPU = ["--device", "cpu", "--threads", "1"]
IN_TIME = 30.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return runs.make_checkpoint(tmp_path_factory.mktemp("cli") / "checkpoint")


@pytest.fixture(scope="module")
def hashes(checkpoint, tmp_path_factory):
    """Of two ranks, without a stop."""
    output = tmp_path_factory.mktemp("whole")
    return generate(checkpoint, runs.request(output), simulate=2, device="cpu").hashes


def command(checkpoint, output, *more):
    return ["generate", str(checkpoint), *SIZES, *CPU, "--output", str(output), *more]


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def printed(hashes) -> str:
    return "".join(f"{digest}  {name}\n" for name, digest in hashes.items())


def test_hashes_are_all_that_goes_to_standard_output(checkpoint, hashes, tmp_path):
    done = invoke(*command(checkpoint, tmp_path, "--simulate", 2, "--print-hashes"))
    assert done.exit_code == 0, done.output
    assert done.stdout == printed(hashes)
    assert "step 4/4" in done.stderr
    assert "preview of its latent" in done.stderr
    assert str(tmp_path / "preview_latents.mp4") in done.stderr


def test_the_first_run_of_the_documents_leaves_what_they_say(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "pipeline.md").read_text(encoding="utf-8")
    commands = re.search(r"```sh\n(.*?)```", text, re.DOTALL)[1].replace("\\\n", " ")
    for line in commands.splitlines():
        program, *arguments = shlex.split(line)
        if program == "magi2":
            done = invoke(*arguments)
            assert done.exit_code == 0, done.output
    files = re.findall(r"^(out/first/\S+)", text, re.MULTILINE)
    assert sorted(files) == sorted(map(str, Path("out/first").iterdir()))
    shapes = {n: tuple(t.shape) for n, t in load_file("out/first/latents.safetensors").items()}
    assert f"video {shapes['video']}, audio {shapes['audio']}, float32" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--width", "50"], "width=50 is no multiple of 16"),
        (["--ulysses-degree", "3"], "ulysses degree 3"),
        (["--simulate", "4", "--expert-parallel-size", "3"], "expert parallel size 3"),
        (["--prompt", "a", "--prompt-file", "b"], "--prompt and --prompt-file are two prompts"),
        (["--prompt-file", "/nowhere/prompt.txt"], "/nowhere/prompt.txt cannot be read"),
        (["--compile", "--compile-dynamic"], "contradict each other"),
        (["--negative-prompt-file", "x"], "is encoded together with a prompt"),
        (
            ["--prompt", "a cat", "--negative-prompt-file", "x", "--no-negative-prompt"],
            "--negative-prompt-file and --no-negative-prompt contradict",
        ),
        (["--threads", "0"], "--threads 0"),
        (["--threads", "1000000000000"], "--threads 1000000000000"),
        (["--timeout", "0"], "--timeout 0"),
        (["--timeout", "nan"], "--timeout nan"),
        (["--timeout", "inf"], "--timeout inf"),
        (["--turbo-decoder", "/nowhere"], "--turbo-decoder /nowhere: there is no such"),
        (["--prompt", "a cat"], "--text-encoder"),
        (["--route-sum", "x"], "route_sum='x'"),
        (["--moe-backend", "x"], "moe_backend='x'"),
        (["--moe-backend", "triton"], "moe_backend='triton' cannot run on cpu: "),
        (["--attention-backend", "x"], "attention_backend='x'"),
        (
            ["--attention-backend", "cudnn"],
            "attention_backend='cudnn' cannot run on cpu: it serves cuda. Use 'auto'",
        ),
        (
            ["--attention-backend", "flash_attn"],
            "attention_backend='flash_attn' cannot run on cpu: it serves cuda and musa",
        ),
        (["--qkv-backend", "x"], "qkv_backend='x'"),
        (["--qkv-backend", "triton"], "qkv_backend='triton' cannot run on cpu: "),
        (["--mhc-backend", "x"], "mhc_backend='x'"),
        (["--mhc-backend", "triton"], "mhc_backend='triton' cannot run on cpu: "),
        (["--backend", "x"], "torch.distributed cannot start:"),
    ],
)
def test_what_is_wrong_is_told_in_a_line(checkpoint, tmp_path, arguments, words):
    done = invoke(*command(checkpoint, tmp_path / "out", *arguments))
    assert done.exit_code == 1
    assert "Traceback" not in done.output
    assert words in done.stderr
    assert done.stderr.splitlines()[-1].startswith("magi2 generate: ") or "--backend" in arguments
    assert not torch.distributed.is_initialized()


def test_the_traceback_of_an_error_may_be_asked_for(tmp_path):
    assert "is no folder" in invoke("generate", tmp_path / "gone").stderr
    done = invoke("--traceback", "generate", tmp_path / "gone")
    assert isinstance(done.exception, ValueError)


@pytest.mark.parametrize("error", [RuntimeError("of a library"), MemoryError("no room")])
def test_errors_of_the_machine_and_its_libraries_are_told_in_text(
    checkpoint, tmp_path, monkeypatch, error
):
    def fail(*args):
        raise error

    monkeypatch.setattr("magi2.pipeline.load_checkpoint", fail)
    done = invoke(*command(checkpoint, tmp_path / "out"))
    assert done.exit_code == 1
    told = done.stderr.splitlines()[-2:]
    assert told[0] == f"magi2 generate: {error}"
    assert told[1] == "`magi2 --traceback generate ...` shows where this was raised."
    done = invoke("--traceback", *command(checkpoint, tmp_path / "out"))
    assert done.exception is error


def test_a_package_that_a_library_misses_is_named_with_the_extra(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    done = invoke(*command(checkpoint, tmp_path / "out"))
    assert done.exit_code == 1
    assert "safetensors" in done.stderr
    assert done.stderr.endswith("pip install 'ulysses-comm[pipeline]'\n")


def test_a_simulated_rank_that_fails_is_named(checkpoint, tmp_path, monkeypatch):
    def fail(model, folder, device):
        if model.topology.sequence_rank == 1:
            raise ValueError("a damaged shard")
        load_checkpoint(model, folder, device)

    monkeypatch.setattr("magi2.pipeline.load_checkpoint", fail)
    done = invoke(*command(checkpoint, tmp_path / "out", "--simulate", 2))
    assert done.exit_code == 1
    assert "magi2 generate: a damaged shard (raised by simulated rank 1 of 2)" in done.stderr


def test_progress_is_lines_without_a_terminal(capsys):
    progress = ConsoleProgress()
    progress.phase("sampling")
    for step in range(1, 41):
        progress.step(step, 40, 100.0 if step == 1 else 2.0)
    lines = capsys.readouterr().err.splitlines()
    assert "sampling" in lines[0]
    assert [line.split("step ")[1].split("/")[0] for line in lines[1:]] == [
        str(step) for step in range(4, 41, 4)
    ]
    # The first step warms up: it says nothing about the others.
    assert "step 20/40, 2 s a step, 0:00:40 left" in lines[5]
    assert _clock(3661.4) == "1:01:01"


def test_progress_is_a_bar_on_a_terminal():
    import io

    from rich.console import Console

    file = io.StringIO()
    progress = ConsoleProgress(Console(file=file, force_terminal=True, width=100))
    progress.step(5, 8, 1.0)
    progress.step(6, 8, 1.5)
    progress.close()
    assert "6/8" in file.getvalue()
    assert "1.5 s/step" in file.getvalue()


def test_missing_packages_are_named_and_others_not_needed():
    program = "import sys; sys.modules['typer'] = None\nimport magi2.__main__ as m\nm.main()"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install 'ulysses-comm[pipeline]'" in done.stderr
    assert "Traceback" not in done.stderr


def start(stop, arguments, **environment):
    """A process of its own that stops itself: see `stopped_command`."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.magi2.stopped_command", *map(str, [*stop, *arguments])],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def hears_interrupts():
    """A background job starts with Ctrl-C ignored, and so do its tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("hears_interrupts")
def test_interrupted_and_killed_it_goes_on_to_the_same_hashes(
    checkpoint, hashes, tmp_path, monkeypatch
):
    arguments = command(checkpoint, tmp_path, "--simulate", 2)
    with monkeypatch.context() as patch:
        stop_at(0, 1, "SIGINT", patch.setattr)
        done = invoke(*arguments)
    assert done.exit_code == 130, done.stderr
    assert "magi2 generate: interrupted" in done.stderr
    assert "The same command with --resume goes on from there." in done.stderr
    killed = start((1, 3, "SIGKILL"), [*arguments, "--resume"])
    _, errors = killed.communicate(timeout=120)
    assert killed.returncode == -signal.SIGKILL, errors
    assert os.listdir(tmp_path) == ["state.safetensors"]
    done = invoke(*arguments, "--resume", "--print-hashes")
    assert done.stdout == printed(hashes), done.stderr
    assert "step 3/4" not in done.stderr


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("SIGKILL", ""),
        pytest.param("error", "rank 1 of 2: the odd rank's own trouble", marks=pytest.mark.long),
    ],
)
def test_a_rank_that_is_lost_ends_the_others(checkpoint, hashes, tmp_path, how, words):
    """As torchrun starts them, but for torchrun, which would end the others itself."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    arguments = command(checkpoint, tmp_path)
    ranks = [
        start((1, 2, how), arguments, RANK=str(rank), LOCAL_RANK=str(rank), **common)
        for rank in range(2)
    ]
    _, lost = ranks[1].communicate(timeout=120)
    ended = time.monotonic()
    _, errors = ranks[0].communicate(timeout=120)
    assert time.monotonic() - ended < IN_TIME
    assert ranks[0].returncode == 1, errors
    assert ranks[1].returncode == (1 if how == "error" else -signal.SIGKILL), lost
    assert words in lost
    assert "Traceback" not in lost + errors
    if how == "SIGKILL":
        assert "rank 0 of 2: another rank is gone" in errors
    else:
        assert "rank 0 of 2: stopped, because rank 1 failed: the odd rank's own" in errors
    assert "magi2 generate: rank 0 of 2: " in errors
    assert "--resume goes on from there" in errors
    # Ranks of the simulator go on where processes were stopped, with the same bits.
    result = generate(checkpoint, runs.request(tmp_path, resume=True), simulate=2, device="cpu")
    assert result.resumed_from >= 2
    assert result.hashes == hashes


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("option", "words"),
    [
        (["--shift", "5"], "shift: 7.0 on rank(s) [0], 5.0 on rank(s) [1]"),
        (["--cfg-parallel-size", "2"], "cfg parallel size: 1 on rank(s) [0], 2 on rank(s) [1]"),
    ],
)
def test_ranks_with_other_options_end_at_once(checkpoint, tmp_path, option, words):
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = [
        start(
            (9, 9, "error"), [*command(checkpoint, tmp_path / "out"), *(option if rank else [])],
            RANK=str(rank), LOCAL_RANK=str(rank), **common,
        )
        for rank in range(2)
    ]  # fmt: skip
    told = "".join(rank.communicate(timeout=IN_TIME)[1] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [1, 1]
    assert told.count(words) == 1, told
    assert "Traceback" not in told
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("every", ["1", "3", "10"])
def test_a_failure_after_the_last_step_names_the_state_that_was_saved(
    checkpoint, tmp_path, monkeypatch, every
):
    def fail(*args, **kwargs):
        raise OSError("the disk is gone")

    monkeypatch.setattr("magi2.media.preview.write_preview", fail)
    done = invoke(*command(checkpoint, tmp_path, "--save-every", every))
    assert done.exit_code == 1
    assert f"step 4 is saved in {tmp_path}. The same command with --resume" in done.stderr


@needs_mpi
@pytest.mark.mpi
def test_mpirun_gives_the_hashes_of_simulated_ranks(checkpoint, hashes, tmp_path):
    done = mpirun(2, "-m", "magi2", *command(checkpoint, tmp_path, "--print-hashes"), limit=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed(hashes)
