"""The benchmark of GPUs, over gloo: what it leaves out, what it computes, what it does in time."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks import bench_magi2_ranks, bench_nvlink, processes, run_many_gpus, tune_push
from benchmarks.harness import Candidate
from benchmarks.nvlink.groups import Groups
from benchmarks.nvlink.overlap import BESIDE, Overlap, hidden_shares, other_shares, paired_shares
from benchmarks.nvlink.rows import NvlinkRow, markdown, table_of_row
from benchmarks.nvlink.stored import open_started, store_by_kernel
from benchmarks.nvlink.timing import keep_right_ones, time_on_all_ranks
from benchmarks.nvlink.ways import OutputExchange, QkvExchange, Shape, floor_of
from magi2 import presets
from tests.ranks import run_ranks
from tests.ulysses_comm.symmetric_ranks import folder_of, run_interpreted, use_files
from ulysses_comm.symmetric.moves import DEFAULT_TUNING, Tuning

CPU = torch.device("cpu")


def check_and_time(group: dist.ProcessGroup) -> tuple[list[str], dict[str, str], list[str]]:
    """Both exchanges, with a candidate that is wrong on one rank and one that does nothing."""
    groups = Groups.make(CPU)
    shape = Shape(tokens=5, heads=12, head_dim=8, dtype=torch.bfloat16)
    names: list[str] = []
    left_out: dict[str, str] = {}
    for exchange in (QkvExchange(shape, groups), OutputExchange(shape, groups)):
        candidates = [*exchange.candidates(), floor_of(exchange)]
        if isinstance(exchange, QkvExchange):
            candidates += broken_ones(candidates[0], group.rank())
        found = keep_right_ones(candidates, CPU, lambda name: None, left_out)
        timed = time_on_all_ranks(found, CPU, seconds=5, rounds=2, warmup=1)
        assert all(one.us > 0 and one.rounds == 2 for one in timed.values())
        names += timed
    return names, left_out, list(groups.left_out)


def broken_ones(right: Candidate, rank: int) -> list[Candidate]:
    kept = right.run()
    wrong = kept if rank else [torch.zeros_like(tensor) for tensor in kept]

    def spoil() -> None:
        for tensor in kept:
            tensor.neg_()

    return [
        Candidate("wrong on rank 0", lambda: wrong, right.check),
        Candidate("stale", lambda: kept, right.check, spoil),
    ]


@pytest.mark.gloo
@pytest.mark.parametrize("world_size", [2, 3])
def test_right_candidates_are_timed_and_wrong_ones_named(world_size: int) -> None:
    for names, left_out, missing in run_ranks(check_and_time, world_size):
        assert set(left_out) == {"wrong on rank 0", "stale"}
        assert left_out["wrong on rank 0"].startswith("rank 0: AssertionError")
        assert "rank 1" not in left_out["wrong on rank 0"]
        # Symmetric memory needs GPUs: named, and nothing else is missing.
        assert missing == ["ours symmetric, lent", "ours symmetric, owned"]
        assert names == [
            "permute + 3 all-to-alls",
            "permute, concatenate + 1",
            "one copy per input + 1",
            "ours packed, NCCL",
            "ours in place, NCCL",
            "flat peer copy",
            "all-to-all + permute",
            "ours flat, NCCL",
            "ours as a view, NCCL",
            "flat peer copy",
        ]


TUNINGS = [DEFAULT_TUNING, Tuning(piece_bytes=16, tile_bytes=32)]


def cut_in_two_ways(group: dist.ProcessGroup, folder: str) -> list[tuple[list[str], str, bool]]:
    """Sweep both exchanges on CPU ranks that interpret the push."""
    state = use_files(group, folder)
    groups = Groups(CPU, group, lent=group)
    shape = Shape(tokens=3, heads=4, head_dim=8, dtype=torch.bfloat16)
    tiles: dict[Tuning, set[int]] = {}
    plan_of = state.plan

    def plan(*args: object, **options: object) -> object:
        made = plan_of(*args, **options)
        tiles.setdefault(state.tuning, set()).add(made.cut.total)
        return made

    state.plan = plan
    found = []
    for exchange in (QkvExchange(shape, groups), OutputExchange(shape, groups)):
        tiles.clear()
        times, left_out = tune_push.sweep(exchange, state, TUNINGS, seconds=5, rounds=2)
        # Each way was cut in its own way, and in no other's.
        own = [len(tiles[tuning]) == 1 for tuning in TUNINGS]
        apart = tiles[TUNINGS[0]] != tiles[TUNINGS[1]]
        text = tune_push.report("both", times, left_out)
        found.append((list(times), text, all(own) and apart))
    return found


@pytest.mark.gloo
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_ways_to_cut_a_push_are_checked_and_timed(tmp_path: Path) -> None:
    for found in run_interpreted(cut_in_two_ways, 2, folder_of(tmp_path)):
        for names, text, apart in found:
            assert names == [*map(str, TUNINGS), "flat peer copy"]
            assert apart
            assert text.startswith("both: flat peer copy ")
            assert text.splitlines()[-1].endswith("the default")


def test_hidden_share_is_what_both_together_save_of_the_exchange() -> None:
    times = {
        "attention": 1000.0,
        "exchange, NCCL": 200.0,
        "started, NCCL": 1040.0,
        "2 head chunks, NCCL": 1300.0,
        "started, symmetric": 1.0,  # its exchange alone was left out
    }
    assert hidden_shares(times) == {"started, NCCL": 0.8, "2 head chunks, NCCL": -0.5}
    assert other_shares(times) == {}


def test_shares_are_those_of_a_round_whatever_the_clock_does_between_rounds() -> None:
    clock, costs = (1000.0, 1400.0, 900.0, 1100.0, 2000.0), (40, 20, 60, 200, 40)
    by_round = {
        "attention": clock,
        "attention, copies beside it": [us + 10 for us in clock],
        "exchange, symmetric": [200.0] * 5,
        "started, symmetric": [us + cost for us, cost in zip(clock, costs, strict=True)],
    }
    hidden, notes = paired_shares(by_round)
    assert hidden == {"started, symmetric": 0.8}
    assert notes == {"started, symmetric": "70% to 80%", BESIDE: "at most 95%, 95% to 95%"}


def test_what_stores_ahead_is_not_charged_for_storing() -> None:
    times = {
        "attention": 1000.0,
        "attention, copies beside it": 1020.0,
        "store": 150.0,
        "exchange, symmetric": 200.0,
        "exchange stored and waited for, symmetric": 400.0,
        "started, symmetric": 1100.0,
        "stored ahead, symmetric": 1200.0,
        "store to a send buffer, no exchange": 50.0,
        "produced ahead, symmetric": 1200.0,
        "2 head chunks stored, NCCL": 1.0,  # its exchange alone was left out
    }
    hidden = {
        "started, symmetric": 0.5,
        "stored ahead, symmetric": 0.75,
        "produced ahead, symmetric": 0.25,
    }
    assert hidden_shares(times) == hidden
    assert other_shares(times) == {"stored ahead, symmetric": 0.8, BESIDE: 0.9}
    notes = paired_shares({name: [us] for name, us in times.items()})[1]
    assert notes["stored ahead, symmetric"] == "75% to 75%, 80% of it without a pack"
    assert notes[BESIDE] == "at most 90%, 90% to 90%"
    del times["store"]
    del hidden["stored ahead, symmetric"]
    assert hidden_shares(times) == hidden
    assert list(other_shares(times)) == [BESIDE]


def overlaps(group: dist.ProcessGroup, folder: str) -> None:
    """All ways to overlap, on CPU ranks that interpret the kernels; the storing one, too."""
    use_files(group, folder)
    groups = Groups(CPU, group, lent=group)
    shape = Shape(tokens=3, heads=6, head_dim=8, dtype=torch.bfloat16)
    overlap = Overlap(shape, groups, produces=True)
    left_out: dict[str, str] = {}
    right = keep_right_ones(overlap.candidates(), CPU, lambda name: None, left_out)
    assert left_out == {}
    exchange = overlap.exchange
    shards = [tensor.unflatten(1, (groups.size, -1)) for tensor in exchange.own]
    for turn in (shards, [tensor[:, :, 1:] for tensor in shards]):
        target = open_started(turn, exchange.splits, group)
        store_by_kernel(turn, target.addresses)
        heads = turn[0].shape[2]
        for result, want in zip(target.start().wait(), exchange.expected, strict=True):
            assert torch.equal(result, want[:, -heads:])
    names = [candidate.name for candidate in right]
    assert names[:3] == ["attention", "store", BESIDE]
    for transport in ("NCCL", "symmetric"):
        ways = [name for name in names if name.endswith(f", {transport}")]
        assert ways == [
            f"{way}, {transport}"
            for way in (
                "exchange",
                "exchange started and waited for",
                "started",
                "3 head chunks",
                "1 head and then 2",
                "exchange stored and waited for",
                "stored ahead",
                "3 head chunks stored",
                "1 head and then 2 stored",
                "exchange produced and waited for",
                "produced ahead",
            )
        ]


@pytest.mark.gloo
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_ways_to_overlap_are_right(tmp_path: Path) -> None:
    # In a process of its own: Triton's sums are interpreted only if it was imported that way.
    code = (
        "import sys; from tests.benchmarks.test_nvlink import overlaps; "
        "from tests.ulysses_comm.symmetric_ranks import run_interpreted; "
        "run_interpreted(overlaps, 2, sys.argv[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, folder_of(tmp_path)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_the_storing_kernel_compiles_for_hopper_with_wide_accesses() -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from benchmarks.nvlink.store_kernel import store_rows_kernel

    constants = {"PART": 1536, "ROWS": 4, "PIECE": 2048, "ALIGN": 16}
    kinds = dict.fromkeys("qkv", "*bf16") | {"addresses": "*i64"}
    kinds |= dict.fromkeys(("tokens", "row", "step"), "i32") | dict.fromkeys(constants, "constexpr")
    aligned = {(place,): [["tt.divisibility", 16]] for place in (0, 1, 2, 5, 6)}
    source = ASTSource(store_rows_kernel, kinds, constants, aligned)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    text = str(built.asm["ptx"])
    assert "ld.global.v4.b32" in text
    assert "st.global.v4.b32" in text
    assert ".local" not in text


def row(**changes: object) -> NvlinkRow:
    facts = {
        "bench": "nvlink", "case": "q, k, v", "device": "gpu", "dtype": "bfloat16",
        "shape": [16384, 2, 12, 128], "ours_us": 460.0, "floor_us": 400.0,
        "floor": "flat peer copy", "baselines": {"ours symmetric": 460.0, "NCCL": 800.0},
        "checked": "", "versions": {"nccl": "2.28"}, "bytes": 100_000_000, "rounds": 9,
        "quartiles_us": {"ours symmetric": [1, 2], "NCCL": [1.0, 2.0], "flat peer copy": [1, 2]},
        "world_size": 2, "ours": "ours symmetric", "predicted_us": 290.0,
    }  # fmt: skip
    return NvlinkRow(**{**facts, **changes})


def test_tables_hold_ratios_rates_and_targets() -> None:
    title, header, cells = table_of_row(row())
    assert "ours symmetric: 1.15 x the floor (target 1.15)" in title
    assert "the cost model predicts 290 us" in title
    assert header[-2:] == ["x flat peer copy", "GB/s sent"]
    assert cells[1] == ["NCCL", "800.0", "1.0 to 2.0", "2.00", "125"]
    title, _, cells = table_of_row(row(hidden={"ours symmetric": 0.85}, predicted_us=None))
    assert "best hidden: ours symmetric, 85% (target 80%)" in title
    assert [line[-1] for line in cells] == ["85%", "", ""]
    noted = row(hidden={"ours symmetric": 0.85}, notes={"ours symmetric": "90% of it", "NCCL": "x"})
    assert [line[-1] for line in table_of_row(noted)[2]] == ["85%, 90% of it", "x", ""]
    text = markdown([row(left_out={"fast-ulysses": "not installed"})])
    assert "- left out: fast-ulysses: not installed" in text
    assert "nccl 2.28" in text


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--tokens", "0"], "expected one at least"),
        (["--rounds", "0"], "expected one at least"),
        (["--world", "1"], "--world 1 --heads 24: expected two ranks at least"),
        (["--world", "0"], "--world 0 --heads 24: expected two ranks at least"),
        (["--world", "2", "--heads", "3"], "heads that they divide"),
        (["--report", "nowhere.jsonl"], "--report nowhere.jsonl: there is no such file"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_ranks_start(
    options: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        bench_nvlink.main(["--device", "cpu", "--out", str(tmp_path), *options])
    assert says in f"{ended.value.code} {capsys.readouterr().err}"


def test_ranks_that_wait_for_one_that_failed_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "GRACE", 0.2)
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\n"
        "if os.environ['RANK'] == '1': sys.exit(3)\n"
        "time.sleep(60 if os.environ['RANK'] == '0' else 0)\n"
    )
    start = time.monotonic()
    codes = processes.run_script_on_ranks(script, [], world_size=3, seconds=30)
    assert codes == [None, 3, 0]
    assert time.monotonic() - start < 10
    assert processes.failure_of(codes) == "rank 0 was killed after the time limit, rank 1 exited 3"


def test_steps_go_on_where_a_call_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [
        run_many_gpus.Step("good", ["-c", "print(1)"], 30),
        run_many_gpus.Step("bad", ["-c", "raise SystemExit('why')"], 30),
        run_many_gpus.Step("hangs", ["-c", "import time; time.sleep(60)"], 0.3),
    ]
    monkeypatch.setattr(run_many_gpus, "steps_of", lambda *_: steps)
    arguments = ["--out", str(tmp_path), "--device", "cpu"]
    with pytest.raises(SystemExit, match="2 of 3 steps failed"):
        run_many_gpus.main(arguments)
    ended = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["ended"] for line in ended] == [
        "passed",
        "FAILED, exit code 1",
        "FAILED, killed after its time limit",
    ]
    with pytest.raises(SystemExit):
        run_many_gpus.main([*arguments, "--seconds", "1"])
    said = (tmp_path / "summary.txt").read_text().splitlines()
    assert "passed before" in said[0]
    assert "left: the time is over" in said[1]
    # What a CPU passed tells nothing of GPUs.
    with pytest.raises(SystemExit):
        run_many_gpus.main([*arguments[:2], "--device", "cuda", "--world", "2", "--seconds", "1"])
    assert "left: the time is over" in (tmp_path / "summary.txt").read_text().splitlines()[0]


def test_two_layers_have_every_kind_and_the_clip_grows_with_the_ranks() -> None:
    for preset in (presets.preview(), presets.tiny()):
        config = bench_magi2_ranks.two_layers(preset)
        assert (config.num_layers, config.multimodal_layers, config.moe.layers) == (2, (0,), (1,))
    for world_size in (2, 4, 8):
        geometry = bench_magi2_ranks.geometry_of("preview", world_size, 3702)
        tokens = 2 * (geometry.num_video_tokens + geometry.audio_length + 222)
        assert abs(tokens / world_size - 3702) < 200
