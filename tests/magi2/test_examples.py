from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from magi2.checkpoint.index import INDEX_NAME

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(monkeypatch, name: str, *arguments: str) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.mark.parametrize(
    "arguments",
    [["--ranks", "1"], ["--ranks", "4", "--expert-size", "2"], ["--ranks", "8", "--branches", "2"]],
)
def test_the_tiny_transformer_equals_one_rank(monkeypatch, capsys, arguments):
    run(monkeypatch, "tiny_transformer.py", *arguments)
    assert capsys.readouterr().out.count("relative RMS") == int(arguments[1])


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("ranks", "arguments"), [(2, []), (4, ["--branches", "2", "--expert-size", "2"])]
)
def test_the_tiny_transformer_runs_under_torchrun(ranks, arguments):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr=127.0.0.1",
    ]
    command += [f"--nproc-per-node={ranks}", str(EXAMPLES / "tiny_transformer.py"), *arguments]
    root = str(EXAMPLES.parent)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("relative RMS") == ranks


@pytest.mark.parametrize("preset", ["tiny", "tiny_uneven"])
def test_a_tiny_checkpoint_is_written_and_loads(monkeypatch, capsys, tmp_path, preset):
    folder = tmp_path / "checkpoint"
    run(monkeypatch, "tiny_checkpoint.py", str(folder), "--preset", preset, "--shard-mib", "1")
    assert "131 tensors" in capsys.readouterr().out
    assert (folder / INDEX_NAME).exists()
    assert len(list(folder.glob("*.safetensors"))) > 1
