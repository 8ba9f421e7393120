"""The hyper-connections' benchmark tries ways that differ, against the floors of the targets."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.bench_mhc import (
    BANDWIDTH,
    Inputs,
    logits_operations,
    logits_tiles,
    map_operations,
    maps_tiles,
    measure,
    mix_operations,
    mix_tiles,
)
from magi2.ops.stream_tiles import LogitsTile, MapsTile, MixTile


def test_ways_start_with_what_runs_today_and_the_others_differ() -> None:
    for tiles, default in (
        (maps_tiles(), MapsTile()),
        (mix_tiles(), MixTile()),
        (logits_tiles(), LogitsTile()),
    ):
        first, *others = tiles
        assert first == default
        assert len(set(others)) == len(others)


def test_floors_are_those_of_the_targets() -> None:
    inputs = Inputs(torch.device("cpu"))
    scale = (3702 * 3072) / (inputs.tokens * inputs.channels) / BANDWIDTH
    groups = (mix_operations, logits_operations)
    floors = {o.name: o.nbytes * scale for group in groups for o in group(inputs)}
    assert floors["pre-mix"] == pytest.approx(27, abs=0.5)
    assert floors["hyper-connect"] == pytest.approx(49, abs=0.5)
    assert floors["norm and logits"] == pytest.approx(22, abs=0.5)


def test_plain_forms_pass_the_checks_that_wrong_results_fail() -> None:
    inputs = Inputs(torch.device("cpu"))
    for group in (mix_operations, map_operations, logits_operations):
        for operation in group(inputs):
            right = operation.plain()
            operation.check(right)
            with pytest.raises(AssertionError):
                operation.check(right * 1.01)


def test_an_operation_without_a_kernel_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    inputs = Inputs(torch.device("cpu"))
    with pytest.raises(RuntimeError, match="pre-mix: no way to cut it is right"):
        measure(next(mix_operations(inputs)), inputs, 1, 0.0)
    assert "without MixTile" in capsys.readouterr().out


@pytest.mark.long
def test_every_operation_runs_in_the_interpreter(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/bench_mhc.py", "--device", "cpu", "--seconds", "0"]
    done = subprocess.run(
        [*command, "--rounds", "1", "--out", str(tmp_path)],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (written,) = tmp_path.glob("mhc-*.jsonl")
    rows = [json.loads(line) for line in written.read_text().splitlines()]
    assert len(rows) == len({row["case"] for row in rows}) == 6
    assert all("eager" in row["baselines"] for row in rows)
