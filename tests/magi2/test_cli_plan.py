"""`magi2 make-tiny-checkpoint`, `inspect` and `plan`: what they write, show and refuse."""

from __future__ import annotations

import json
from importlib import metadata

import pytest
from typer.testing import CliRunner

from magi2 import presets
from magi2.cli import tables
from magi2.cli.app import app
from magi2.config import Magi2Config
from magi2.encoders.features_file import load_text_features
from magi2.initialise import random_state_dict
from magi2.release import open_release


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
    written = run("make-tiny-checkpoint", folder, "--preset", "tiny_uneven", "--shard-mib", "0.25")
    assert "131 tensors" in written
    return folder


def test_tiny_checkpoint_is_one_as_released(checkpoint):
    release = open_release(checkpoint)
    assert release.config == presets.tiny_uneven()
    assert len(release.checkpoint.files) > 2
    name, weight = next(iter(random_state_dict(release.config).items()))
    assert (release.checkpoint.file_of[name].read(name) == weight).all()
    prompt, negative = load_text_features(release.parts["text_features"])
    assert negative is not None
    assert (len(prompt.features), len(negative.features)) == (11, 5)
    assert prompt.features.shape[1] == release.config.text_channels
    assert prompt.special_tokens == ()


def test_tiny_checkpoint_overwrites_nothing(checkpoint):
    before = {path: path.read_bytes() for path in checkpoint.iterdir()}
    assert "checkpoint" in run("make-tiny-checkpoint", checkpoint, code=1)
    assert {path: path.read_bytes() for path in checkpoint.iterdir()} == before


def test_inspect_shows_parts_ranks_and_what_is_missing(checkpoint):
    shown = run("inspect", checkpoint, "--ulysses-degree", 6, "--expert-parallel-size", 6)
    for text in ("routed experts", "heads of the mixture", "found", "text features"):
        assert text in shown
    assert "audio decoder (Stable Audio Open 1.0) (--audio-vae)" in shown
    assert shown.count(" none ") == 3  # ranks without heads of the mixture
    (checkpoint / "model.safetensors.index.json").rename(checkpoint / "kept")
    try:
        assert "missing" not in run("inspect", checkpoint)  # a configuration alone
    finally:
        (checkpoint / "kept").rename(checkpoint / "model.safetensors.index.json")
    assert "routed experts" in run("inspect", checkpoint / "config.json")


def test_inspect_refuses_a_damaged_checkpoint(checkpoint):
    shard = next(checkpoint.glob("model-*.safetensors"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    try:
        assert shard.name in run("inspect", checkpoint, code=1)
    finally:
        shard.write_bytes(whole)


def test_plan_of_the_released_model_has_its_documented_figures(tmp_path):
    path = tmp_path / "deep" / "plan.json"
    shown = run(
        *("plan", "--ulysses-degree", 8, "--expert-parallel-size", 8, "--json", path),
    )
    for text in ("3,702 tokens a rank", "68.24 MB", "22.75 MB", "30.33 MB", "0.95 MB", "33.77 GiB"):
        assert text in shown
    assert "predicted, not measured" in shown
    (plan,) = json.loads(path.read_text())
    assert plan["tokens_of_a_rank"] == 3702
    assert plan["fits"] is True
    parts = [*plan["components"].values(), *plan["exchanges"]]
    total = sum(part["predicted_seconds"] for part in parts)
    assert total == pytest.approx(plan["predicted_step_seconds"])


def test_plan_of_the_larger_clip_has_its_documented_tokens():
    shown = run("plan", "--resolution", "540p", "--ulysses-degree", 8)
    assert "57,344 video and 250 audio tokens" in shown
    assert "115,632 in both branches" in shown
    assert "14,454 tokens a rank" in shown


def test_plan_compares_topologies():
    shown = run("plan", "preview", "--compare", "8,1", "--compare", "4,2,4", "--compare", "1,1")
    rows = [line.split() for line in shown.splitlines()]
    assert ["8,1,4", "4,2,4", "1,1,1"] in rows
    assert ["tokens", "of", "a", "rank", "3,702", "3,702", "29,616"] in rows
    assert ["fits", "yes", "yes", "no"] in rows
    shown = run("plan", *("--compare", "8,1") * 5)
    assert shown.count("The busiest rank") == 2  # four topologies side by side, and one


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "--ulysses-degree", 8, "--cfg-parallel-size", 2),
        ("plan", "--resolution", "540p", *("--compare", "1,1") * 9),
        ("inspect", "preview", "--ulysses-degree", 24, "--cfg-parallel-size", 2),
    ],
)
def test_tables_fit_a_terminal_of_80_columns(arguments, monkeypatch):
    monkeypatch.setattr(tables, "_LOG_WIDTH", 80)
    monkeypatch.setenv("COLUMNS", "80")
    lines = run(*arguments).splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)  # which is what a column without room ends with


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "nowhere"], "expected a checkpoint folder"),
        (["plan", "--compare", "8"], "ULYSSES,CFG"),
        (["plan", "--device", "abacus"], "expected one of h200"),
        (["plan", "--width", "450"], "450"),
        (["plan", "--resolution", "1080p"], "expected one of 272p, 540p"),
        (["plan", "--num-frames", "124"], "124"),
        (["plan", "--ulysses-degree", "7"], "ulysses degree 7"),
        (["inspect", "tiny", "--ulysses-degree", "3"], "ulysses degree 3"),
        (["inspect", "/nowhere"], "no folder"),
    ],
)
def test_commands_refuse_with_a_line_that_says_why(arguments, message):
    shown = run(*arguments, code=1)
    assert message in shown
    assert shown.startswith(f"magi2 {arguments[0]}: ")


@pytest.mark.parametrize(
    "command", ["bench-step", "generate", "inspect", "make-tiny-checkpoint", "plan"]
)
def test_help_names_every_option_whole_in_80_columns(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = run(command, "--help")
    assert "--help" in shown
    assert "…" not in shown  # which is what a name without room ends with


def test_version_is_that_of_the_package():
    assert run("--version").startswith(f"magi2 of ulysses-comm {metadata.version('ulysses-comm')}")


def test_config_files_are_read(tmp_path):
    path = tmp_path / "one.json"
    path.write_text(json.dumps(presets.tiny().to_dict()))
    assert Magi2Config.from_file(path) == presets.tiny()
    assert "4 layers of 4 streams of 256" in run("inspect", path)
