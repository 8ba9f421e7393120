"""Text features on disk."""

from __future__ import annotations

import pytest
import torch

from magi2.checkpoint.shard_file import write_shard
from magi2.encoders import features_file
from magi2.encoders.features_file import load_text_features, save_text_features
from magi2.encoders.text_features import TextFeatures


def features(tokens, channels=6, images=0, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(tokens)
    rows = torch.randn(tokens + images, channels, generator=generator).to(dtype)
    return TextFeatures(features=rows[:tokens], special_tokens=tuple(rows[tokens:]))


@pytest.mark.parametrize("images", [0, 2])
@pytest.mark.parametrize("negative", [None, 0, 3])
def test_round_trip_is_bitwise(tmp_path, images, negative):
    path = tmp_path / "features.safetensors"
    prompt = features(5, images=images)
    other = None if negative is None else features(negative)
    save_text_features(path, prompt, other)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    read, read_other = load_text_features(path)
    assert torch.equal(read.features, prompt.features)
    assert read.features.dtype == torch.bfloat16
    assert len(read.special_tokens) == images
    for mine, theirs in zip(read.special_tokens, prompt.special_tokens, strict=True):
        assert torch.equal(mine, theirs)
    assert (read_other is None) == (other is None)
    if other is not None:
        assert torch.equal(read_other.features, other.features)


def test_other_programs_can_read_and_write_it(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    path = tmp_path / "features.safetensors"
    rows = torch.randn(4, 3)
    safetensors.save_file({"prompt.features": rows}, path)
    assert torch.equal(load_text_features(path)[0].features, rows)
    save_text_features(path, features(2), features(3))
    assert safetensors.load_file(path)["negative.features"].shape == (3, 6)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"features": torch.ones(2, 3)}, r"\['features'\]: expected 'prompt.features'"),
        ({"prompt.features": torch.ones(2, 3), "x": torch.ones(1)}, "'x'"),
        ({"prompt.features": torch.ones(1, 2, 3)}, "without a batch dimension"),
        ({"prompt.features": torch.ones(2, 3, dtype=torch.int32)}, "floating type"),
        ({"prompt.features": torch.ones(0, 3)}, "has no tokens"),
        ({"prompt.features": torch.tensor([[1.0, float("nan")]])}, "NaN or infinity"),
        (
            {"prompt.features": torch.ones(2, 3), "negative.features": torch.ones(2, 4)},
            "same channels and dtype",
        ),
        (
            {"prompt.features": torch.ones(2, 3), "negative.features": torch.ones(2, 3).half()},
            "same channels and dtype",
        ),
    ],
)
def test_other_files_are_refused(tmp_path, tensors, message):
    path = tmp_path / "features.safetensors"
    write_shard(path, tensors.items())
    with pytest.raises(ValueError, match=message):
        load_text_features(path)


def test_unreadable_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        load_text_features(tmp_path / "absent.safetensors")
    (tmp_path / "text.safetensors").write_text("no safetensors file at all")
    with pytest.raises(ValueError, match=r"truncated|no safetensors header"):
        load_text_features(tmp_path / "text.safetensors")


def test_a_failed_save_leaves_the_old_file(tmp_path):
    path = tmp_path / "features.safetensors"
    save_text_features(path, features(2))
    before = path.read_bytes()
    with pytest.raises(ValueError, match="same channels"):
        save_text_features(path, features(2), features(2, channels=5))
    with pytest.raises(OSError, match="No such file"):
        save_text_features(tmp_path / "absent" / "x.safetensors", features(2))
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_a_save_that_stops_half_way_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "features.safetensors"
    save_text_features(path, features(2))
    before = path.read_bytes()

    def stop(partial, tensors):
        partial.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(features_file, "write_shard", stop)
    with pytest.raises(OSError, match="No space left"):
        save_text_features(path, features(3))
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_features_refuse_shapes_that_contradict():
    with pytest.raises(ValueError, match=r"expected \(tokens, channels\)"):
        TextFeatures(features=torch.ones(3))
    with pytest.raises(ValueError, match=r"special_tokens\[1\]"):
        TextFeatures(
            features=torch.ones(2, 3), special_tokens=(torch.ones(3), torch.ones(3).half())
        )
