"""Runs with decoders and encoders beside the checkpoint: frames, sound, images."""

from __future__ import annotations

import dataclasses
import json
import shutil

import av
import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from magi2 import pipeline
from magi2.checkpoint.shard_file import write_shard
from magi2.decoders.audio import decode_audio, load_audio_decoder
from magi2.decoders.turbo import TurboDecoder, decode_turbo, load_turbo_decoder
from magi2.decoders.turbo_config import TurboConfig
from magi2.decoders.wan import WAN22_VAE_CONFIG, decode_with_vae, load_video_vae
from magi2.decoding import load_decoders
from magi2.encoders.features_file import save_text_features
from magi2.encoders.image import encode_reference_image, load_reference_image
from magi2.encoders.text import load_text_encoder
from magi2.hashes import raw_sha256
from magi2.pipeline import generate
from magi2.release import open_release
from tests.magi2 import runs, tiny_qwen, tiny_wan

ONE_STEP = {"settings": {"num_inference_steps": 1}}
TURBO_JSON = {
    "latent_channels": 48,
    "decoder_block_out_channels": [4, 4, 4, 4],
    "decoder_layers_per_block": [1, 1, 1, 1, 1],
    "decoder_spatio_temporal_scaling": [False, True, True, True],
    "decoder_spatio_only": [False, True, False, False],
    "patch_size": 2,
    "first_chunk_size": 7,
    "step_size": 7,
}


def make_turbo(folder, channels=48):
    folder.mkdir()
    document = {**TURBO_JSON, "latent_channels": channels}
    decoder = TurboDecoder(TurboConfig.from_dict(document), dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    state = {
        f"decoder.{name}": torch.randn(weight.shape, generator=generator) / 4
        for name, weight in decoder.state_dict().items()
    }
    write_shard(folder / "turbo.safetensors", state.items())
    (folder / "turbo.json").write_text(json.dumps(document))


def make_vae(folder):
    torch.manual_seed(0)
    sizes = {"base_dim": 4, "decoder_base_dim": 4, "num_res_blocks": 1}
    diffusers.AutoencoderKLWan(**{**WAN22_VAE_CONFIG, **sizes}).save_pretrained(folder)


def make_audio_vae(folder, **changes):
    torch.manual_seed(0)
    sizes = {
        "encoder_hidden_size": 2,
        "downsampling_ratios": [2, 4, 4, 8, 8],
        "channel_multiples": [1, 1, 1, 1, 1],
        "decoder_channels": 2,
        "decoder_input_channels": 64,
        "audio_channels": 2,
    }
    diffusers.AutoencoderOobleck(**{**sizes, **changes}).save_pretrained(folder)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """With every decoder beside it, under the usual names."""
    folder = tmp_path_factory.mktemp("decoding") / "checkpoint"
    runs.make_checkpoint(folder, video_channels=48, audio_channels=64, text_channels=32)
    make_turbo(folder / "turbo_vae")
    make_vae(folder / "vae")
    make_audio_vae(folder / "audio_vae")
    return folder


def check_video(path, frames, rate=44100):
    with av.open(str(path)) as container:
        video, audio = container.streams.video[0], container.streams.audio
        assert (video.width, video.height, video.average_rate) == (48, 32, 12.5)
        assert sum(1 for _ in container.decode(video=0)) == frames
        assert [stream.rate for stream in audio] == [rate]


def test_frames_and_sound_become_a_video(checkpoint, tmp_path):
    result = generate(checkpoint, runs.request(tmp_path, **ONE_STEP), device="cpu", simulate=2)
    assert [path.name for path in result.files] == ["latents.safetensors", "video.mp4", "run.json"]
    frames = decode_turbo(
        load_turbo_decoder(
            checkpoint / "turbo_vae" / "turbo.safetensors",
            config=checkpoint / "turbo_vae" / "turbo.json",
        ),
        result.video,
    )
    samples = decode_audio(load_audio_decoder(checkpoint / "audio_vae"), result.audio)
    assert frames.shape == (5, 32, 48, 3)
    assert samples.shape == (2, 10 * 1764)
    assert result.hashes == {
        "video_latent": raw_sha256(result.video),
        "audio_latent": raw_sha256(result.audio),
        "video_frames": raw_sha256(frames),
        "audio_samples": raw_sha256(samples),
    }
    check_video(tmp_path / "video.mp4", frames=5)
    assert result.notes == ()
    assert json.loads((tmp_path / "run.json").read_text())["video_decoder"] == "turbo decoder"


def test_without_the_turbo_decoder_the_video_vae_decodes(checkpoint, tmp_path):
    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("turbo_vae"))
    result = generate(folder, runs.request(tmp_path / "out", **ONE_STEP), device="cpu")
    frames = decode_with_vae(load_video_vae(checkpoint / "vae"), result.video)
    assert result.hashes["video_frames"] == raw_sha256(frames)
    check_video(tmp_path / "out" / "video.mp4", frames=5)
    (note,) = result.notes
    assert "the full Wan2.2 video VAE, not from the released turbo decoder" in note
    assert "--turbo-decoder" in note


def test_sound_alone_is_written_as_such(tmp_path):
    folder = runs.make_checkpoint(tmp_path / "c", audio_channels=64)
    make_audio_vae(folder / "audio_vae")
    result = generate(folder, runs.request(tmp_path / "out", **ONE_STEP), device="cpu")
    names = [path.name for path in result.files]
    assert names[:2] == ["latents.safetensors", "audio.wav"]
    assert "preview_latents.mp4" in names
    assert set(result.hashes) == {"video_latent", "audio_latent", "audio_samples"}
    assert ["--turbo-decoder" in note for note in result.notes] == [True]


def test_a_decoder_of_other_latents_is_refused_before_sampling(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "load_checkpoint", None)
    make_turbo(tmp_path / "turbo", channels=8)
    with pytest.raises(ValueError, match=r"decodes video latents of 8 channels.*makes 48"):
        generate(
            checkpoint,
            runs.request(tmp_path / "out"),
            parts={"turbo_decoder": tmp_path / "turbo"},
            device="cpu",
        )
    (tmp_path / "turbo" / "second.pth").touch()
    with pytest.raises(ValueError, match="expected one file of weights"):
        generate(
            checkpoint,
            runs.request(tmp_path / "out"),
            parts={"turbo_decoder": tmp_path / "turbo"},
            device="cpu",
        )


@pytest.mark.parametrize(
    ("part", "changes", "words"),
    [
        ("audio_vae", {"audio_channels": 3}, "sound of 3 channels: expected 1 or 2"),
        ("audio_vae", {"downsampling_ratios": [2, 4, 4, 4, 8]}, "1024 samples .* expected 2048"),
        ("vae", {"scale_factor_spatial": 8}, "8 pixels a side of a latent: expected 16"),
        ("vae", {"scale_factor_temporal": 8}, "8 frames of a latent: expected 4"),
        ("turbo_vae", {"patch_size": 1}, "8 pixels a side of a latent: expected 16"),
    ],
)
def test_a_decoder_of_another_scale_is_refused(checkpoint, tmp_path, part, changes, words):
    folder = tmp_path / part
    if part == "audio_vae":
        make_audio_vae(folder, **changes)
    else:
        shutil.copytree(checkpoint / part, folder)
        config = folder / ("config.json" if part == "vae" else "turbo.json")
        config.write_text(json.dumps({**json.loads(config.read_text()), **changes}))
    if part == "turbo_vae":
        small = TurboDecoder(TurboConfig.from_file(config), dtype=torch.float32).state_dict()
        named = {f"decoder.{name}": tensor for name, tensor in small.items()}
        write_shard(folder / "turbo.safetensors", named.items())
    release = open_release(checkpoint)
    key = {"vae": "video_vae", "turbo_vae": "turbo_decoder"}.get(part, part)
    with pytest.raises(ValueError, match=words):
        load_decoders(dataclasses.replace(release, parts={key: folder}))


@pytest.fixture
def seen(monkeypatch):
    """What the denoiser of each rank was conditioned on."""
    conditionings, true_denoiser = [], pipeline.Denoiser

    def denoiser(model, geometry, conditioning, **keywords):
        conditionings.append(conditioning)
        return true_denoiser(model, geometry, conditioning, **keywords)

    monkeypatch.setattr(pipeline, "Denoiser", denoiser)
    return conditionings


def make_picture(path):
    pixels = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def test_a_reference_image_conditions_the_clip(checkpoint, tmp_path, seen):
    picture, features = make_picture(tmp_path / "picture.png"), tmp_path / "features.safetensors"
    save_text_features(features, *runs.features(32, num_images=1))
    result = generate(
        checkpoint,
        runs.request(tmp_path / "out", images=(picture,), width=96, height=64, **ONE_STEP),
        parts={"text_features": features},
        simulate=2,
        device="cpu",
    )
    expected = encode_reference_image(
        load_video_vae(checkpoint / "vae"), load_reference_image(picture, 64, 96)
    )
    special = load_file(features)["prompt.special_tokens"][0]
    assert len(seen) == 2
    for conditioning in seen:
        (image,) = conditioning.images
        assert torch.equal(image.latent, expected)
        assert torch.equal(image.special_token, special)
    assert set(result.hashes) >= {"video_frames"}


def test_prompt_and_image_are_encoded_together(checkpoint, tmp_path, seen):
    picture = make_picture(tmp_path / "picture.png")
    tiny_qwen.save(tmp_path / "encoder")
    settings = {"num_inference_steps": 1, "use_negative_prompt": False}
    wanted = runs.request(
        tmp_path / "out", prompt="the cat", images=(picture,), width=96, height=64,
        settings=settings,
    )  # fmt: skip
    generate(checkpoint, wanted, parts={"text_encoder": tmp_path / "encoder"}, device="cpu")
    # The sentence that names the figure is added before the text is encoded.
    expected = load_text_encoder(tmp_path / "encoder").encode("the cat", num_images=1)
    (conditioning,) = seen
    assert torch.equal(conditioning.prompt, expected.features)
    assert torch.equal(conditioning.images[0].special_token, expected.special_tokens[0])
    assert conditioning.images[0].special_token.any()
    assert conditioning.negative.shape == (0, 32)


def test_images_of_several_shapes_are_refused(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "load_checkpoint", None)
    pictures = (tmp_path / "wide.png", tmp_path / "high.png")
    Image.new("RGB", (64, 32)).save(pictures[0])
    Image.new("RGB", (32, 64)).save(pictures[1])
    features = tmp_path / "features.safetensors"
    save_text_features(features, *runs.features(32, num_images=2))
    wanted = runs.request(tmp_path / "out", images=pictures, width=96, height=64)
    with pytest.raises(ValueError, match="expected one size"):
        generate(checkpoint, wanted, parts={"text_features": features}, device="cpu")
    other = tmp_path / "vae"
    diffusers.AutoencoderKLWan(**tiny_wan.CONFIG).save_pretrained(other)
    wanted = runs.request(tmp_path / "out", images=pictures[:1] * 2, width=96, height=64)
    with pytest.raises(ValueError, match="makes latents of 4 channels: expected 48"):
        generate(
            checkpoint, wanted, parts={"text_features": features, "video_vae": other}, device="cpu"
        )
    wanted = runs.request(tmp_path / "out", images=(tmp_path / "gone.png",) * 2)
    with pytest.raises(ValueError, match=r"gone\.png cannot be read as an image"):
        generate(checkpoint, wanted, parts={"text_features": features}, device="cpu")
