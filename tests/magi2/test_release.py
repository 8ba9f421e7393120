"""Checkpoint folders as released, and the parts beside the transformer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from magi2 import presets
from magi2.checkpoint import save_checkpoint
from magi2.initialise import random_state_dict
from magi2.release import DEFAULT_SEED, PARTS, open_release


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "whole"
    config = presets.tiny_uneven()
    save_checkpoint(random_state_dict(config), config, folder, max_shard_bytes=1 << 20)
    return folder


@pytest.fixture
def copy(checkpoint, tmp_path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


def change_config(folder: Path, **sections: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | sections))


def test_released_sections_are_read(copy):
    change_config(
        copy,
        evaluation_config={"num_inference_steps": 20, "video_txt_guidance_scale": 3.0, "z_dim": 48},
        data_proxy_config={"time_channel_dim": 16, "video_fps": 24},
        engine_config={"seed": 7, "cp_size": 8, "ep_size": 8},
    )
    release = open_release(copy)
    assert release.config == presets.tiny_uneven()
    assert release.settings.num_inference_steps == 20
    assert release.settings.video_guidance_scale == 3.0
    assert release.settings.time_channels == 16
    assert release.seed == 7


def test_sections_that_are_missing_have_released_values(checkpoint):
    release = open_release(checkpoint)
    assert release.seed == DEFAULT_SEED
    assert (release.settings.num_inference_steps, release.settings.shift) == (100, 7.0)
    assert [part.key for part in release.missing()] == [part.key for part in PARTS]


@pytest.mark.parametrize("name", ["preview", "transformer"])
def test_the_transformer_may_lie_in_a_folder_of_its_own(checkpoint, tmp_path, name):
    shutil.copytree(checkpoint, tmp_path / name)
    (tmp_path / "text_encoder").mkdir()
    (tmp_path / name / "negative_prompt.txt").write_text("no")
    release = open_release(tmp_path)
    assert release.folder == tmp_path / name
    assert release.parts == {
        "text_encoder": tmp_path / "text_encoder",
        "negative_prompt_file": tmp_path / name / "negative_prompt.txt",
    }


def test_a_part_that_is_given_goes_before_one_that_is_found(copy, tmp_path):
    (copy / "vae").mkdir()
    other = tmp_path / "elsewhere"
    other.mkdir()
    assert open_release(copy, {"video_vae": None}).parts == {"video_vae": copy / "vae"}
    assert open_release(copy, {"video_vae": other}).parts == {"video_vae": other}


def test_a_part_that_is_not_where_it_was_said_to_be_is_named(copy, tmp_path):
    with pytest.raises(ValueError, match=r"--turbo-decoder .*gone: there is no such"):
        open_release(copy, {"turbo_decoder": tmp_path / "gone"})


def test_what_is_missing_is_explained(checkpoint):
    release = open_release(checkpoint)
    for part in release.missing():
        text = release.explain(part)
        assert part.flag in text
        assert str(checkpoint) in text
        assert all(name in text for name in part.usual_names)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"evaluation_config": {"shfit": 3}}, "shfit"),
        ({"evaluation_config": {"vae_stride": [4, 8, 8]}}, "vae_stride"),
        ({"engine_config": {"seed": "x"}}, "engine_config.seed is 'x'"),
        ({"engine_config": 3}, "engine_config is 3"),
        ({"engine_config": {"seed": 2**63}}, "from 0 to 2"),
        ({"arch_config": {}}, "config.json"),
    ],
)
def test_a_configuration_of_something_else_is_refused(copy, sections, words):
    change_config(copy, **sections)
    with pytest.raises(ValueError, match=words):
        open_release(copy)


def test_what_is_no_checkpoint_is_refused(copy, tmp_path):
    with pytest.raises(ValueError, match=r"is no folder.*make-tiny-checkpoint"):
        open_release(tmp_path / "gone")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no checkpoint"):
        open_release(tmp_path / "empty")
    for content, words in ((b"{", "is not JSON"), (b"[]", "expected a JSON object")):
        (copy / "config.json").write_bytes(content)
        with pytest.raises(ValueError, match=words):
            open_release(copy)
    (copy / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json cannot be read"):
        open_release(copy)


def test_a_missing_shard_is_named(copy):
    (copy / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match="model-00002-of-00003"):
        open_release(copy)


def test_the_hash_tells_weights_apart(checkpoint, copy):
    same = open_release(checkpoint).sha256()
    assert open_release(copy).sha256() == same
    shard = copy / "model-00002-of-00003.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert open_release(copy).sha256() != same
