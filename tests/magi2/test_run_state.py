"""The state of an unfinished run on disk."""

from __future__ import annotations

import errno
import os

import pytest
import torch
from safetensors.torch import save_file

from magi2.atomic_file import write_atomically
from magi2.run_state import check_same_run, load_state, save_state

TENSORS = {
    "video": torch.arange(12.0).view(3, 4).t(),  # not contiguous
    "audio": torch.tensor([1.5, -0.0, float("nan")]),
    "history": torch.arange(4, dtype=torch.int64),
}
FINGERPRINT = {"seed": "42", "num_inference_steps": "100"}


def bits(tensor: torch.Tensor) -> tuple:
    flat = tensor.contiguous().flatten()
    return tensor.dtype, tensor.shape, flat.view(torch.uint8).tolist()


def test_what_is_saved_comes_back_to_the_bit(tmp_path):
    path = tmp_path / "state.safetensors"
    save_state(path, TENSORS, {"step": "3"}, FINGERPRINT)
    stored = load_state(path)
    assert {name: bits(t) for name, t in stored.tensors.items()} == {
        name: bits(t) for name, t in TENSORS.items()
    }
    assert stored.metadata == {"step": "3"}
    assert stored.fingerprint == FINGERPRINT
    assert os.listdir(tmp_path) == ["state.safetensors"]


@pytest.mark.parametrize("at", ["write", "fsync", "replace"])
def test_a_full_disk_leaves_the_state_before(tmp_path, monkeypatch, at):
    path = tmp_path / "state.safetensors"
    save_state(path, TENSORS, {"step": "3"}, FINGERPRINT)
    before = path.read_bytes()

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if at == "write":
        monkeypatch.setattr("pathlib.Path.open", full)
    else:
        monkeypatch.setattr(os, at, full)
    with pytest.raises(OSError, match=r"No space left .* is as it was. Free at least \d+ bytes"):
        save_state(path, TENSORS, {"step": "4"}, FINGERPRINT)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["state.safetensors"]


def test_an_interrupted_write_leaves_nothing_behind(tmp_path, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "out.bin", b"x")
    assert os.listdir(tmp_path) == []


def test_a_disk_that_is_full_in_truth(tmp_path):
    """/dev/full refuses every write, as a full disk does."""
    if not os.path.exists("/dev/full"):
        pytest.skip("needs /dev/full")
    (tmp_path / "out.bin.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left .* does not exist"):
        write_atomically(tmp_path / "out.bin", b"x" * 10)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(OSError, match=r"No such file .*gone/state"):
        write_atomically(tmp_path / "gone" / "state", b"x")


def test_the_same_run_may_go_on():
    check_same_run("state", FINGERPRINT, dict(reversed(FINGERPRINT.items())))


def test_another_run_is_refused_with_all_differences(tmp_path):
    other = {"seed": "7", "num_inference_steps": "100", "image": "x" * 200}
    with pytest.raises(ValueError, match="after step 3") as error:
        check_same_run("state", FINGERPRINT, other, "3")
    text = str(error.value)
    assert "seed: 42 there, 7 now" in text
    assert "image: (not stated) there, xxx" in text
    assert "num_inference_steps" not in text
    assert "x" * 100 not in text
    assert "--overwrite" in text


@pytest.mark.parametrize("content", [b"", b"no safetensors", None])
def test_what_is_no_state_is_refused(tmp_path, content):
    path = tmp_path / "state.safetensors"
    if content is None:
        save_file({"video": torch.zeros(2)}, path)  # safetensors, but no run's
    else:
        path.write_bytes(content)
    with pytest.raises(ValueError, match="is no state of a run"):
        load_state(path)


def test_a_state_that_is_cut_short_is_refused(tmp_path):
    path = tmp_path / "state.safetensors"
    save_state(path, TENSORS, {}, FINGERPRINT)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match="is no state of a run"):
        load_state(path)


def test_a_state_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        load_state(tmp_path / "state.safetensors")
