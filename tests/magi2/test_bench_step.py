"""`magi2 bench-step` on one rank, on simulated and on real ones."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from magi2 import presets
from magi2.checkpoint import save_checkpoint
from magi2.cli.app import app
from magi2.geometry import Geometry
from magi2.initialise import random_state_dict
from magi2.launch import ParallelSizes
from magi2.timing import TimingSummary
from magi2.timing.bench import BenchRequest, bench_step, fill_randomly, keep_layers
from magi2.timing.exchanges import BRANCHES, DISPATCH, QKV
from magi2.topology import Topology
from magi2.transformer import Magi2Transformer
from tests.ranks import run_ranks
from ulysses_comm.simulate import simulate

SMALL = ["--width", "48", "--height", "32", "--num-frames", "5", "--text-tokens", "7"]
SMALL += ["--negative-text-tokens", "5", "--num-inference-steps", "4"]


def request(**changes) -> BenchRequest:
    config = keep_layers(presets.tiny_uneven(), 2)
    geometry = Geometry.of(width=48, height=32, num_frames=5)
    given = {"config": config, "geometry": geometry, "text_lengths": (7, 5), "num_steps": 4}
    return BenchRequest(**{**given, **changes})


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["bench-step", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def test_command_writes_its_numbers_and_draws_them(tmp_path):
    checkpoint = tmp_path / ("checkpoint" * 9)  # a name longer than a line
    config = presets.tiny_uneven()
    save_checkpoint(random_state_dict(config), config, checkpoint)
    shown = run(checkpoint, *SMALL, "--simulate", 2, "--output", tmp_path / "out")
    assert "2 simulated ranks" in shown
    assert "take turns" in shown
    assert shown.count("loading weights") == 1  # the first rank speaks
    assert "timing 4 steps of 56 tokens" in shown
    assert "step 4/4" in shown
    document = json.loads((tmp_path / "out" / "steps.json").read_text())
    summary = TimingSummary.from_json(json.dumps(document["summary"]))
    assert (summary.num_ranks, summary.simulated) == (2, True)
    assert summary.measured_steps == [2, 3]
    assert summary.exchanges[QKV].count == 4
    assert document["facts"]["weights"] == checkpoint.name
    assert document["facts"]["tokens"] == 2 * (12 + 10) + 12
    assert (tmp_path / "out" / "steps.png").read_bytes().startswith(b"\x89PNG")


def test_command_runs_the_first_layers_of_a_preset_alone(tmp_path):
    shown = run(
        *("tiny_uneven", *SMALL, "--num-layers", 1, "--no-picture", "--output", tmp_path),
    )
    assert "experts" not in shown
    assert "dense-out" in shown
    assert not (tmp_path / "steps.png").exists()


def test_bytes_are_those_of_the_ranks_that_run():
    result = bench_step(request(), sizes=ParallelSizes(cfg=2, expert=1), simulate=4)
    assert BRANCHES in result.summary.exchanges
    assert DISPATCH not in result.summary.exchanges
    assert result.facts["cfg_parallel_size"] == 2
    assert result.facts["peak_memory_bytes_of_rank_0"] is None


def on_gloo(group):
    result = bench_step(request(), device="cpu")
    return result.is_first, result.summary, result.facts["launcher"]


@pytest.mark.gloo
@pytest.mark.long
def test_real_ranks_agree_on_the_summary():
    (first, summary, launcher), (second, other, _) = run_ranks(on_gloo, 2)
    assert (first, second, launcher) == (True, False, "caller")
    assert summary == other
    assert summary.num_ranks == 2
    assert not summary.simulated
    simulated = bench_step(request(), simulate=2).summary
    for name, part in simulated.exchanges.items():
        assert summary.exchanges[name].bytes_sent == part.bytes_sent
    assert 0 < summary.mean_computing_seconds < summary.mean_step_seconds


def test_random_weights_are_whole_and_ranks_agree_on_what_both_hold():
    config = presets.tiny_uneven()

    def step(group):
        model = Magi2Transformer(config, topology=Topology.of_group(group), device="meta")
        fill_randomly(model.to_empty(device="cpu"), seed=3)
        return model.state_dict()

    with torch.no_grad():
        states = simulate(3, step).results
    for name, tensor in states[0].items():
        assert tensor.isfinite().all()
        if tensor.numel() > 1:
            assert tensor.float().std() > 0
        same = torch.equal(tensor, states[1][name])
        assert same == (".moe_mlp." not in name), name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compile", "--compile-dynamic"], "contradict"),
        (["--num-layers", "9"], "expected 1 to 4"),
        (["--simulate", "2", "--ulysses-degree", "4"], "does not give the 2 rank"),
        (["--output", "/dev/null/steps"], "/dev/null"),
        (["--timeout", "nan"], "--timeout nan"),
        (["--timeout", "inf"], "--timeout inf"),
        (["--threads", "1000000000000"], "--threads 1000000000000"),
    ],
)
def test_command_refuses_with_a_line_that_says_why(arguments, message):
    shown = run("tiny_uneven", *SMALL, *arguments, code=1)
    assert message in shown
    assert shown.startswith("magi2 bench-step: ")


@pytest.mark.parametrize("command", [["bench-step", "tiny", *SMALL], ["generate", "nowhere"]])
def test_ranks_are_not_simulated_in_each_of_several_processes(command, monkeypatch):
    launched = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, [*command, "--simulate", "4"])
    assert result.exit_code == 1
    assert "--simulate 4, but 2 processes were started" in result.output
