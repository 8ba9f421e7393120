"""The audio decoder: both kinds of files, and the clock of its samples."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch

from magi2.decoders.audio import (
    OOBLECK_CONFIG,
    decode_audio,
    load_audio_decoder,
    oobleck_name,
    oobleck_weights,
)

diffusers = pytest.importorskip("diffusers")
pytest.importorskip("scipy")
# diffusers builds on torch's old weight norm.
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm")

TINY = {
    **OOBLECK_CONFIG,
    "encoder_hidden_size": 2,
    "channel_multiples": [1, 1, 2, 2, 2],
    "decoder_channels": 2,
    "decoder_input_channels": 4,
}
UNIT = {"snake1": 0, "conv1": 1, "snake2": 2, "conv2": 3}


def original_name(name):
    """Stable Audio's name for a decoder weight of diffusers."""
    parts = name.split(".")
    if parts[1] != "block":
        number = {"conv1": 0, "snake1": 6, "conv2": 7}[parts[1]]
        return ".".join(["pretransform.model.decoder.layers", str(number), parts[2]])
    head = f"pretransform.model.decoder.layers.{int(parts[2]) + 1}.layers"
    if parts[3].startswith("res_unit"):
        unit = int(parts[3].removeprefix("res_unit"))
        return f"{head}.{unit + 1}.layers.{UNIT[parts[4]]}.{parts[5]}"
    return f"{head}.{ {'snake1': 0, 'conv_t1': 1}[parts[3]] }.{parts[4]}"


def as_original(state):
    """A Stable Audio checkpoint around a decoder's weights."""
    weights = {
        original_name(name): tensor.flatten() if name.endswith(("alpha", "beta")) else tensor
        for name, tensor in state.items()
        if name.startswith("decoder.")
    }
    other = {
        "pretransform.model.encoder.layers.0.bias": torch.ones(3),
        "model.model.transformer.weight": torch.ones(2),
    }
    return {**weights, **other}


@pytest.fixture(scope="module")
def vae():
    torch.manual_seed(0)
    made = diffusers.AutoencoderOobleck(**TINY).requires_grad_(False).eval()
    for name, tensor in made.state_dict().items():
        if name.endswith(("alpha", "beta")):
            tensor.normal_(0, 0.1)
    return made


def decoder_state(model):
    return {name: t for name, t in model.state_dict().items() if name.startswith("decoder.")}


def assert_same_decoder(loaded, vae):
    expected = decoder_state(vae)
    assert loaded.state_dict().keys() == expected.keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_released_names_map_both_ways():
    with torch.device("meta"):
        state = decoder_state(diffusers.AutoencoderOobleck(**OOBLECK_CONFIG))
    original = {original_name(name): tensor for name, tensor in state.items()}
    assert len(original) == len(state) == 182
    for name in state:
        assert oobleck_name(original_name(name).removeprefix("pretransform.model.")) == name
    known = {
        "decoder.layers.0.weight_v": "decoder.conv1.weight_v",
        "decoder.layers.1.layers.0.alpha": "decoder.block.0.snake1.alpha",
        "decoder.layers.5.layers.1.weight_g": "decoder.block.4.conv_t1.weight_g",
        "decoder.layers.2.layers.4.layers.3.bias": "decoder.block.1.res_unit3.conv2.bias",
        "decoder.layers.6.beta": "decoder.snake1.beta",
        "decoder.layers.7.weight_v": "decoder.conv2.weight_v",
    }
    assert {name: oobleck_name(name) for name in known} == known


@pytest.mark.parametrize("form", ["ckpt", "safetensors"])
def test_stable_audio_checkpoint_decodes_to_the_same_bits(tmp_path, vae, form):
    weights = as_original(vae.state_dict())
    if form == "safetensors":
        from safetensors.torch import save_file

        path = tmp_path / "model.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path)
    else:
        path = tmp_path / "model.ckpt"
        torch.save({"state_dict": weights}, path)
    loaded = load_audio_decoder(path, config=TINY)
    assert_same_decoder(loaded, vae)
    z = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded.decode(z.T[None]).sample, vae.decode(z.T[None]).sample)
    assert torch.equal(decode_audio(loaded, z), decode_audio(vae, z))


def test_diffusers_folder_loads_without_its_encoder(tmp_path, vae):
    vae.save_pretrained(tmp_path / "vae")
    for path in (tmp_path, tmp_path / "vae"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loaded = load_audio_decoder(path)
        assert_same_decoder(loaded, vae)
        assert not hasattr(loaded, "encoder")


def test_decoding_gives_44100_samples_a_second(vae):
    z = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    assert vae.decode(z.T[None]).sample.shape == (1, 2, 5 * 2048)
    samples = decode_audio(vae, z)
    assert (samples.shape, samples.dtype) == ((2, 5 * 1764), torch.float32)


def test_ten_seconds_are_exact_and_pitch_is_kept():
    """A decoder that makes a tone of 440 Hz, on its own clock of 51200 samples a second."""
    time = torch.arange(250 * 2048, dtype=torch.float64) / 51200
    tone = torch.sin(2 * torch.pi * 440 * time).float()

    class Tone:
        config = SimpleNamespace(decoder_input_channels=64)
        dtype, device = torch.float32, torch.device("cpu")

        def decode(self, z):
            assert z.shape == (1, 64, 250)
            return SimpleNamespace(sample=torch.stack([tone, -tone])[None])

    samples = decode_audio(Tone(), torch.zeros(250, 64))
    assert samples.shape == (2, 441000)
    time = torch.arange(441000, dtype=torch.float64) / 44100
    expected = torch.sin(2 * torch.pi * 440 * time).float()
    torch.testing.assert_close(samples[0], expected, rtol=0, atol=1e-4)
    assert torch.equal(samples[1], -samples[0])


def test_faulty_files_and_latents_are_refused(tmp_path, vae):
    weights = as_original(vae.state_dict())
    del weights["pretransform.model.decoder.layers.6.alpha"]
    path = tmp_path / "model.ckpt"
    torch.save(weights, path)
    with pytest.raises(ValueError, match=r"missing: decoder\.snake1\.alpha"):
        load_audio_decoder(path, config=TINY)
    with pytest.raises(ValueError, match=r"no weight under 'pretransform\.model\.decoder\.'"):
        oobleck_weights({"model.weight": torch.ones(1)}, path)
    for wrong in (torch.ones(4, 3), torch.ones(1, 3, 4), torch.ones(0, 4)):
        with pytest.raises(ValueError, match=r"expected \(frames, 4\)"):
            decode_audio(vae, wrong)
