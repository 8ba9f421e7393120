"""The attention's and the layer's benchmarks run on a CPU, at sizes that take no time."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import bench_layer
from benchmarks.bench_attention import Sizes, attention_rows, gate_rows, store_rows, weigh_rows
from magi2 import presets
from magi2.modules.sequence import SequenceDispatcher
from magi2.regions import Regions
from magi2.timing.bench import keep_layers

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nan_filled_empty():
    """No filling: it would be timed."""


def test_candidates_that_do_not_run_are_left_out_and_the_others_timed(capsys):
    # Without the interpreter Triton serves no CPU: what is left is torch.
    for rows, names in (
        (attention_rows, {"auto, dense", "cpu_flash, strided", "flex, dense"}),
        (gate_rows, set()),
        (weigh_rows, {"eager"}),
        (store_rows, set()),
    ):
        for row in rows(CPU, 1):
            assert row.ours_us > 0
            assert names <= row.baselines.keys()
    told = capsys.readouterr().out
    assert "without 'cudnn, strided': RuntimeError: attention_backend='cudnn' cannot run" in told
    assert "without 'ours'" in told


def test_sizes_are_those_of_the_target():
    sizes = Sizes(torch.device("cuda"))
    assert sizes.flops / 1e12 == pytest.approx(0.674, abs=1e-3)
    assert sizes.flops / 550e6 == pytest.approx(1225, abs=1)
    assert (sizes.tokens, sizes.local) == (3702, 3)


def test_a_layer_is_taken_apart_without_other_ranks(tmp_path):
    arguments = ["--device", "cpu", "--rounds", "1", "--only", "eager", "--profile"]
    bench_layer.main([*arguments, "--out", str(tmp_path)])
    (path,) = tmp_path.glob("*.jsonl")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["variant"] for r in records] == ["eager"] * 2 + ["eager, torch"] * 2
    assert [r["layer"] for r in records] == ["mixture layer", "dense layer"] * 2
    assert path.with_suffix(".txt").read_text().count("dense layer, eager") == 2
    for record in records:
        parts = record["median_us"]
        assert set(record["floor_us"]) == set(parts) - {"whole layer"}
        assert 0 < sum(parts.values()) - parts["whole layer"] <= parts["whole layer"]


def test_local_exchanges_move_what_real_ones_would():
    config = presets.tiny()
    bench = bench_layer.Bench(config, (37, 43), CPU)
    model = bench.model(bench_layer.Options())
    plan = bench.plan(model)
    assert isinstance(plan.sequence, SequenceDispatcher)
    with torch.no_grad():
        attention = model.block.layers[0].attention
        qkv, _ = attention.project(bench.streams[:, 0], plan)
        received = plan.sequence.scatter_heads(qkv)
        assert [x.shape for x in received] == [(80, 1, config.head_dim)] * 3
        # Rank 0's own rows come back from it: they are the first, and its first head.
        assert torch.equal(received[0][:10, 0], qkv[0][:, 0, 0])
        returned = plan.sequence.gather_head_shards(received[0])
        assert returned.shape == (10, 8, 1, config.head_dim)
        assert torch.equal(returned, qkv[0])
        assert torch.equal(plan.sequence.gather_heads(received[0]), qkv[0].flatten(1, 2))
    assert Regions.of(model) is None


def test_floors_are_what_the_released_layer_must_take():
    config = keep_layers(presets.preview(), 3)
    bench = object.__new__(bench_layer.Bench)
    bench.config, bench.sequences, bench.tokens = config, (14601, 15015), 3702
    bench.layers = {"mixture layer": 2, "dense layer": 0}
    floors = bench.floors("mixture layer")
    assert floors["attention"] == pytest.approx(853, abs=2)  # 0.674 TFLOP
    assert floors["experts"] == pytest.approx(663 + 22, abs=5)  # router in float32
    assert floors["exchange to heads"] == pytest.approx(3 * floors["exchange from heads"])
    assert set(bench.floors("dense layer")) == {
        "attention-in",
        "attention",
        "dense-out",
        "exchange to heads",
        "exchange from heads",
    }
