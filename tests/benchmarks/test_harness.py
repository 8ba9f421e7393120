"""The harness refuses wrong results, interleaves, and writes what its readers expect."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest
import torch

from benchmarks import harness
from benchmarks.harness import Candidate, Results, Row

CPU = torch.device("cpu")


def test_a_gpu_that_is_not_there_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert harness.usable_device("cpu") == CPU
    with pytest.raises(SystemExit, match=r"--device cuda:1: .* sees no CUDA GPU here\. Run on"):
        harness.usable_device("cuda:1")


def _candidate(name: str, value: float = 1.0, log: list[str] | None = None) -> Candidate:
    def run() -> torch.Tensor:
        if log is not None:
            log.append(name)
        return torch.tensor([value, 2.0])

    return Candidate(name, run, harness.expect_bits(torch.tensor([1.0, 2.0])))


def _row(ours: Candidate, *baselines: Candidate, floor: Candidate | None = None) -> Row:
    return harness.run_case(
        "demo",
        "a case",
        device=CPU,
        dtype="float32",
        shape=(2,),
        nbytes=16,
        ours=ours,
        baselines=baselines,
        floor=floor,
        floor_is="nothing",
        checked="bits",
        rounds=5,
    )


@pytest.mark.parametrize("wrong", ["ours", "baseline", "floor"])
def test_a_wrong_candidate_is_refused_before_anything_is_timed(wrong: str) -> None:
    log: list[str] = []
    values = {name: 3.0 if name == wrong else 1.0 for name in ("ours", "baseline", "floor")}
    ours, baseline, floor = (_candidate(name, value, log) for name, value in values.items())
    with pytest.raises(RuntimeError, match=f"'{wrong}' is wrong"):
        _row(ours, baseline, floor=floor)
    assert len(log) == len(set(log)), "a candidate ran more than its one check"


@pytest.mark.parametrize(
    ("expected", "result"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64)),
        (torch.ones(2, 1), torch.ones(2)),
        (torch.tensor([float("nan")]), torch.tensor([float("-nan")])),
    ],
)
def test_expect_bits_sees_more_than_values(expected: torch.Tensor, result: torch.Tensor) -> None:
    harness.expect_bits(expected)(expected.clone())
    if result.isnan().any():
        result = (expected.view(torch.int32) ^ 1).view(torch.float32)
    with pytest.raises(AssertionError):
        harness.expect_bits(expected)(result)


def test_outputs_are_poisoned_before_they_are_checked() -> None:
    output = torch.tensor([1.0, 2.0])

    def lazy() -> torch.Tensor:
        return output

    def poison() -> None:
        output.fill_(9.0)

    good = harness.expect_bits(torch.tensor([1.0, 2.0]))
    harness.check_candidates([Candidate("lazy", lazy, good)], CPU)
    with pytest.raises(RuntimeError, match="lazy"):
        harness.check_candidates([Candidate("lazy", lazy, good, poison)], CPU)


def test_two_candidates_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="a name of its own"):
        _row(_candidate("same"), _candidate("same"))


def test_every_round_times_each_candidate_once_in_changing_order() -> None:
    log: list[str] = []
    candidates = [_candidate(name, log=log) for name in "abc"]
    samples = harness.time_interleaved(candidates, CPU, rounds=40, warmup=2)
    assert {name: len(taken) for name, taken in samples.items()} == {"a": 40, "b": 40, "c": 40}
    timed = log[2 * 3 :]
    rounds = ["".join(timed[i : i + 3]) for i in range(0, len(timed), 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert len(set(rounds)) == 6, "some order never came up in 40 rounds"


def test_times_are_those_of_the_call() -> None:
    slow = Candidate("slow", lambda: time.sleep(0.003))
    fast = Candidate("fast", lambda: None)
    row = _row(slow, fast)
    assert 3000 <= row.ours_us < 30000
    assert row.baselines["fast"] < 1000
    low, high = row.quartiles_us["slow"]
    assert 3000 <= low <= high


def test_row_holds_what_readers_of_the_results_rely_on(tmp_path: Path) -> None:
    with Results("demo", CPU, tmp_path) as results:
        results.add(_row(_candidate("ours"), _candidate("base"), floor=_candidate("plain")))
        results.add(_row(_candidate("ours")))
    assert results.path == tmp_path / f"demo-{harness.device_name(CPU)}.jsonl"
    first, second = (json.loads(line) for line in results.path.read_text().splitlines())
    assert set(first) == {
        "bench", "case", "device", "dtype", "shape", "ours_us", "floor_us", "floor", "baselines",
        "checked", "versions", "bytes", "rounds", "quartiles_us",
    }  # fmt: skip
    assert first["device"].startswith("cpu-")
    assert first["device"].endswith("core")
    assert list(first["baselines"]) == ["base"]
    assert set(first["quartiles_us"]) == {"ours", "base", "plain"}
    assert first["floor_us"] > 0
    assert second["floor_us"] is None
    assert {"python", "torch"} <= set(first["versions"])


def test_a_run_without_a_row_leaves_the_results_of_the_last_one(tmp_path: Path) -> None:
    with Results("demo", CPU, tmp_path) as results:
        results.add(_row(_candidate("ours")))
    before = results.path.read_text()
    assert len(before.splitlines()) == 1
    with Results("demo", CPU, tmp_path) as results:
        pass
    assert results.path.read_text() == before
    with Results("demo", CPU, tmp_path) as results:
        results.add(_row(_candidate("ours")))
        assert len(results.path.read_text().splitlines()) == 1


def test_table_gives_ratios_in_one_direction() -> None:
    row = dataclasses.replace(
        _row(_candidate("ours"), _candidate("base")),
        ours_us=10.0,
        floor_us=8.0,
        baselines={"base": 25.0},
        bytes=5_000_000,
    )
    other = dataclasses.replace(row, floor_us=None, baselines={"else": 5.0})
    header, cells = harness.table_of([row, other])
    assert header[-2:] == ["base\nus (x ours)", "else\nus (x ours)"]
    assert cells[0][2:] == ["5.0", "10.0", "8.0", "1.250", "25.0 (2.50x)", ""]
    assert cells[1][4:] == ["-", "-", "", "5.0 (0.50x)"]


@pytest.mark.parametrize("with_rich", [True, False])
def test_table_prints_with_and_without_rich(
    with_rich: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if with_rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(__import__("sys").modules, "rich.console", None)
    harness.print_table("a title", ["case", "us"], [["first", "1.0"], ["second", "2.0"]])
    out = capsys.readouterr().out
    assert "a title" in out
    assert [line for line in out.splitlines() if "second" in line and "2.0" in line]
