"""The Wan2.2 VAE: both kinds of files, and decoding with it."""

from __future__ import annotations

import json

import pytest
import torch

from magi2.decoders.latent_statistics import LatentStatistics
from magi2.decoders.wan import WAN22_VAE_CONFIG, decode_with_vae, load_video_vae
from magi2.decoders.wan_names import diffusers_name
from tests.magi2 import tiny_wan

pytest.importorskip("diffusers")


@pytest.fixture(scope="module")
def vae():
    return tiny_wan.make()


@pytest.fixture(scope="module")
def folder(vae, tmp_path_factory):
    path = tmp_path_factory.mktemp("wan") / "vae"
    vae.save_pretrained(path)
    return path


def assert_same(loaded, vae):
    expected = vae.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_original_names_of_the_released_file_map_onto_diffusers():
    state = tiny_wan.make(WAN22_VAE_CONFIG, device="meta").state_dict()
    assert len(state) == 196
    assert sum(tensor.numel() for tensor in state.values()) == 704_688_668
    original = tiny_wan.as_original(state)
    assert len(original) == 196
    assert {diffusers_name(name) for name in original} == set(state)
    for name, tensor in original.items():
        assert state[diffusers_name(name)] is tensor
    assert all(diffusers_name(name) == name for name in state)


@pytest.mark.parametrize("form", ["pth", "nested", "safetensors"])
def test_original_file_loads(tmp_path, vae, form):
    weights = tiny_wan.as_original(vae.state_dict())
    if form == "safetensors":
        from safetensors.torch import save_file

        path = tmp_path / "vae.safetensors"
        save_file(weights, path)
    else:
        path = tmp_path / "Wan2.2_VAE.pth"
        torch.save({"model_state": weights} if form == "nested" else weights, path)
    loaded = load_video_vae(path, config=tiny_wan.CONFIG)
    assert_same(loaded, vae)
    assert not any(parameter.requires_grad for parameter in loaded.parameters())


def test_diffusers_folder_loads_alone_or_in_a_pipeline(folder, vae):
    assert_same(load_video_vae(folder), vae)
    assert_same(load_video_vae(folder.parent), vae)
    assert load_video_vae(folder, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_loading_prints_and_warns_nothing(folder, capfd, recwarn):
    load_video_vae(folder)
    captured = capfd.readouterr()
    assert (captured.out, captured.err, len(recwarn)) == ("", "", 0)


def test_decoding_denormalises_first(vae):
    z = torch.randn(4, 3, 2, 3, generator=torch.Generator().manual_seed(0))
    frames = decode_with_vae(vae, z)
    assert (frames.shape, frames.dtype) == ((9, 32, 48, 3), torch.uint8)
    mean = torch.tensor(tiny_wan.CONFIG["latents_mean"]).view(4, 1, 1, 1)
    std = torch.tensor(tiny_wan.CONFIG["latents_std"]).view(4, 1, 1, 1)
    pixels = vae.decode((z / (1 / std) + mean)[None]).sample[0]
    expected = ((pixels * 0.5 + 0.5).clamp(0, 1) * 255).to(torch.uint8).permute(1, 2, 3, 0)
    assert torch.equal(frames, expected)
    with pytest.raises(ValueError, match="without a batch dimension"):
        decode_with_vae(vae, z[None])
    with pytest.raises(ValueError, match="expected 4 channels first"):
        decode_with_vae(vae, z[:3])


def test_faulty_files_are_refused(tmp_path, vae):
    weights = tiny_wan.as_original(vae.state_dict())
    path = tmp_path / "vae.pth"
    del weights["decoder.upsamples.0.upsamples.3.time_conv.bias"]
    torch.save(weights, path)
    with pytest.raises(
        ValueError, match=r"missing: decoder\.up_blocks\.0\.upsampler\.time_conv\.bias"
    ):
        load_video_vae(path, config=tiny_wan.CONFIG)
    torch.save({"decoder.middle.0.residual.0.gamma": torch.ones(1)}, path)
    with pytest.raises(ValueError, match=r"VAE of Wan2\.1"):
        load_video_vae(path)
    torch.save({"epoch": 3}, path)
    with pytest.raises(ValueError, match=r"holds \['epoch'\]"):
        load_video_vae(path)


def test_faulty_folders_are_refused(tmp_path, folder):
    with pytest.raises(ValueError, match=r"no config\.json"):
        load_video_vae(tmp_path)
    from safetensors.torch import load_file, save_file

    name = "diffusion_pytorch_model.safetensors"
    weights = load_file(folder / name)
    del weights["quant_conv.bias"]
    save_file(weights, tmp_path / name)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"missing keys: quant_conv\.bias"):
        load_video_vae(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / "config.json").write_text(json.dumps({**config, "base_dim": "x"}))
    for _ in ("of another kind", "missing"):
        with pytest.raises(ValueError, match="cannot be loaded as AutoencoderKLWan"):
            load_video_vae(tmp_path)
        (tmp_path / "config.json").write_text(json.dumps(config))


def test_statistics_come_from_the_config(vae):
    statistics = LatentStatistics.from_config(vae.config)
    assert statistics.mean == (0.1, -0.2, 0.3, 0.0)
    with pytest.raises(ValueError, match="no latents_mean"):
        LatentStatistics.from_config(object())
    with pytest.raises(ValueError, match="1 means and 2 deviations"):
        LatentStatistics(mean=(0.0,), std=(1.0, 1.0))
    with pytest.raises(ValueError, match="positive"):
        LatentStatistics(mean=(0.0,), std=(0.0,))
