"""What a request names is read and checked before any weights."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from PIL import Image

from magi2 import inputs, pipeline
from magi2.encoders.features_file import save_text_features
from magi2.inputs import read_text_file
from magi2.output_folder import OutputFolder, bytes_needed
from magi2.pipeline import generate
from magi2.settings import SamplingSettings
from tests.magi2 import runs, tiny_qwen

SHORTEST = "a"


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    tiny_qwen.save(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """For the tiny encoder, whose features have 32 channels."""
    return runs.make_checkpoint(tmp_path_factory.mktemp("inputs") / "checkpoint", text_channels=32)


@pytest.fixture
def no_weights(monkeypatch):
    """Nothing may come so far as to read weights."""
    for module, name in (
        (pipeline, "load_checkpoint"),
        (pipeline, "load_decoders"),
        (inputs, "load_text_encoder"),
    ):
        monkeypatch.setattr(module, name, None)


def refused(checkpoint, output, parts=None, simulate=2, **changes) -> str:
    with pytest.raises(ValueError, match=r".") as error:
        generate(
            checkpoint, runs.request(output, **changes), parts=parts, simulate=simulate,
            device="cpu",
        )  # fmt: skip
    assert not output.exists() or not [p for p in output.iterdir() if p.suffix != ".txt"]
    return str(error.value)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"width": 50}, "width=50 is no multiple of 16"),
        ({"height": 8}, "height=8"),
        ({"num_frames": 12}, "num_frames=12"),
        ({"num_frames": 5, "seconds": 1.0}, "two lengths"),
        ({"settings": {"num_inference_steps": 0}}, "num_inference_steps=0"),
        ({"settings": {"num_inference_steps": 1001}}, "num_inference_steps=1001"),
        ({"settings": {"shift": -1.0}}, "shift=-1.0"),
        ({"simulate": 4}, "heads do not split over 4 ranks"),
        ({"prompt": "  "}, "the prompt is empty"),
        (
            {"prompt": "a cat"},
            "a prompt has to be encoded, but the text encoder (Qwen3.5-27B) cannot",
        ),
    ],
)
def test_impossible_requests_are_refused(checkpoint, tmp_path, changes, words):
    assert words in refused(checkpoint, tmp_path / "out", **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": -1}, "seed=-1"),
        ({"compile": "yes"}, "compile='yes'"),
        ({"save_every": -1}, "save_every=-1"),
        ({"resume": True, "overwrite": True}, "contradict"),
        ({"settings": {"steps": 3}}, "['steps'] are unknown"),
    ],
)
def test_impossible_values_are_refused_at_once(tmp_path, changes, words):
    with pytest.raises(ValueError, match=r".") as error:
        runs.request(tmp_path, **changes)
    assert words in str(error.value)


def test_text_files_that_hold_no_text_are_refused(tmp_path):
    path = tmp_path / "prompt.txt"
    for content, words in (
        (None, "cannot be read: No such file"),
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"caf\xe9", "is not UTF-8 text, from byte 3 on"),
    ):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ValueError, match=words):
            read_text_file(path, "the prompt file")
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        read_text_file(tmp_path, "the prompt file")
    path.write_text("日本\n", encoding="utf-8")
    assert read_text_file(path, "the prompt file") == "日本"


def test_a_mark_of_utf_8_is_no_part_of_a_text(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_bytes(b'\xef\xbb\xbf{"global_layer": {}}\r\n')
    assert read_text_file(path, "the prompt file") == '{"global_layer": {}}'
    path.write_bytes(b"\xef\xbb\xbf")
    with pytest.raises(ValueError, match="is empty"):
        read_text_file(path, "the prompt file")


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ('{"global_layer": {"context": null}}', "the prompt has no tokens"),
        ('{"global_layer": {"context": "a \\ud800"}}', "'\\ud800' at character 11, which is no"),
        (os.fsdecode(b"caf\xe9"), "'\\udce9' at character 3, which is no character"),
    ],
)
def test_prompts_without_text_are_refused(checkpoint, encoder, tmp_path, prompt, words):
    parts = {"text_encoder": encoder}
    settings = {"use_negative_prompt": False}
    message = refused(checkpoint, tmp_path / "out", parts, prompt=prompt, settings=settings)
    assert words in message


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_tokenizer_is_named(checkpoint, encoder, tmp_path, name):
    damaged = tmp_path / "damaged"
    shutil.copytree(encoder, damaged)
    (damaged / name).write_text("[]")
    message = refused(
        checkpoint,
        tmp_path / "out",
        {"text_encoder": damaged},
        prompt="a cat",
        settings={"use_negative_prompt": False},
    )
    assert f"{damaged} has no tokenizer that can be loaded: " in message


@pytest.mark.usefixtures("no_weights")
def test_texts_that_the_model_was_not_made_for_are_refused(
    checkpoint, encoder, tmp_path, monkeypatch
):
    monkeypatch.setattr(inputs, "MAX_TOKENS", 40)
    negative = tmp_path / "negative.txt"
    negative.write_text("dull")
    parts = {"text_encoder": encoder, "negative_prompt_file": negative}
    other = {"allow_other_negative_prompt": True}
    output = tmp_path / "out"
    long = "x" * 41
    assert "the prompt has 41 tokens: expected at most 40" in refused(
        checkpoint, output, parts, prompt=long, **other
    )
    negative.write_text(long)
    assert "the negative prompt has 41 tokens" in refused(
        checkpoint, output, parts, prompt="x", **other
    )
    assert "expected the released negative prompt" in refused(checkpoint, output, parts, prompt="x")
    del parts["negative_prompt_file"]
    message = refused(checkpoint, output, parts, prompt="x")
    assert "--no-negative-prompt" in message
    assert "--negative-prompt-file" in message
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "has no tokenizer" in refused(
        checkpoint, output, {"text_encoder": empty}, prompt="x",
        settings={"use_negative_prompt": False},
    )  # fmt: skip


@pytest.mark.usefixtures("no_weights")
def test_features_of_something_else_are_refused(checkpoint, tmp_path, monkeypatch):
    path, output = tmp_path / "features.safetensors", tmp_path / "out"
    parts = {"text_features": path}
    save_text_features(path, *runs.features(24))
    assert "24 channels" in refused(checkpoint, output, parts)
    save_text_features(path, runs.features(32)[0])
    assert "--no-negative-prompt" in refused(checkpoint, output, parts)
    save_text_features(path, *runs.features(32, num_images=1))
    assert "special tokens for 1 reference image(s), and 0" in refused(checkpoint, output, parts)
    monkeypatch.setattr(inputs, "MAX_TOKENS", 6)
    save_text_features(path, *runs.features(32))
    assert "has 7 tokens: expected at most 6" in refused(checkpoint, output, parts)
    path.write_bytes(b"no features")
    assert "features.safetensors" in refused(checkpoint, output, parts)


@pytest.mark.usefixtures("no_weights")
def test_missing_parts_are_named(checkpoint, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(checkpoint, bare)
    (bare / "text_features.safetensors").unlink()
    message = refused(bare, tmp_path / "out")
    assert "the text features cannot be found" in message
    assert "--text-features" in message
    image = tmp_path / "image.png"
    path = tmp_path / "features.safetensors"
    save_text_features(path, *runs.features(32, num_images=1))
    message = refused(checkpoint, tmp_path / "out", {"text_features": path}, images=(image,))
    assert "--video-vae" in message


@pytest.mark.usefixtures("no_weights")
def test_a_folder_that_cannot_be_written_to_is_refused(checkpoint, tmp_path, monkeypatch):
    file = tmp_path / "file.txt"
    file.write_text("in the way")
    with pytest.raises(ValueError, match="cannot be made"):
        generate(checkpoint, runs.request(file / "out"), device="cpu")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 1 << 20))
    assert "has 1 MiB free: expected" in refused(checkpoint, tmp_path / "out")


def test_room_is_reckoned_for_what_is_written():
    geometry = runs.request(None).geometry_of(SamplingSettings())
    latents = 4 * (2 * 2 * 3 * 8 + 10 * 6)
    less = bytes_needed(geometry, 8, 6, decodes_video=False)
    more = bytes_needed(geometry, 8, 6, decodes_video=True)
    assert less >= 9 * latents
    assert more - less == 5 * 48 * 32 * 3 // 6


def test_a_folder_is_only_cleared_of_files_of_runs(tmp_path):
    for name in ("latents.safetensors", "video.mp4", "run.json", "notes.txt"):
        (tmp_path / name).write_text("x")
    assert OutputFolder(tmp_path).prepare(resume=False, overwrite=True, num_bytes=0) is False
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_run_that_goes_on_encodes_nothing_again(checkpoint, encoder, tmp_path, monkeypatch):
    monkeypatch.setattr("magi2.media.preview.write_preview", lambda *args, **kwargs: [])
    parts = {"text_encoder": encoder}

    def go_on(prompt, progress=None, parts=parts, images=()):
        settings = {"use_negative_prompt": False}
        wanted = runs.request(
            tmp_path, prompt=prompt, images=images, settings=settings, resume=True
        )
        return generate(checkpoint, wanted, parts=parts, device="cpu", progress=progress)

    with pytest.raises(KeyboardInterrupt):
        go_on("the cat", runs.StopAt(2))
    monkeypatch.setattr(inputs, "load_text_encoder", None)
    with pytest.raises(ValueError, match=r"texts: .* there, .* now"):
        go_on("the mat")
    images = (tmp_path / "image.png",)
    Image.new("RGB", (32, 32)).save(images[0])
    with pytest.raises(ValueError, match=r"images: 0 there, 1 now"):
        go_on("the cat", parts={**parts, "video_vae": tmp_path}, images=images)
    assert go_on("the cat").resumed_from == 2


@pytest.mark.parametrize("content", [None, b"damaged"])
def test_features_that_were_lost_are_made_anew(checkpoint, encoder, tmp_path, monkeypatch, content):
    monkeypatch.setattr("magi2.media.preview.write_preview", lambda *args, **kwargs: [])
    wanted = {"prompt": "the cat", "settings": {"use_negative_prompt": False}}
    parts = {"text_encoder": encoder}
    with pytest.raises(KeyboardInterrupt):
        generate(
            checkpoint, runs.request(tmp_path, **wanted), parts=parts, device="cpu",
            progress=runs.StopAt(2),
        )  # fmt: skip
    kept = tmp_path / "text_features.safetensors"
    before = kept.read_bytes()
    kept.unlink()
    if content:
        kept.write_bytes(content)
    wanted = runs.request(tmp_path, resume=True, **wanted)
    assert generate(checkpoint, wanted, parts=parts, device="cpu").resumed_from == 2
    assert kept.read_bytes() == before


def test_a_prompt_is_encoded_and_its_features_kept(checkpoint, encoder, tmp_path, monkeypatch):
    """Again from the features that were kept: the same bits, without an encoder."""
    monkeypatch.setattr("magi2.media.preview.write_preview", lambda *args, **kwargs: [])
    negative = tmp_path / "negative.txt"
    negative.write_text("dull")
    first = generate(
        checkpoint,
        runs.request(
            tmp_path / "first", prompt="the cat sat", allow_other_negative_prompt=True,
            settings={"num_inference_steps": 1},
        ),
        parts={"text_encoder": encoder, "negative_prompt_file": negative},
        simulate=2,
        device="cpu",
    )  # fmt: skip
    again = generate(
        checkpoint,
        runs.request(tmp_path / "again", settings={"num_inference_steps": 1}),
        parts={"text_features": tmp_path / "first" / "text_features.safetensors"},
        device="cpu",
        simulate=2,
    )
    other = generate(
        checkpoint,
        runs.request(tmp_path / "other", settings={"num_inference_steps": 1}),
        device="cpu",
        simulate=2,
    )
    assert again.hashes == first.hashes
    assert other.hashes != first.hashes
    assert torch.isfinite(first.video).all()
