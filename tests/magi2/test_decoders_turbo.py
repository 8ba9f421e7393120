"""The turbo decoder: released names and sizes, its arithmetic, its windows, its files."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from magi2.checkpoint.shard_file import write_shard
from magi2.decoders.frames import to_bytes
from magi2.decoders.latent_statistics import WAN22_STATISTICS, LatentStatistics
from magi2.decoders.turbo import TurboConfig, TurboDecoder, decode_turbo, load_turbo_decoder
from magi2.decoders.turbo_blocks import unpatchify
from magi2.decoders.windows import decode_windows, plan_windows
from tests.magi2.turbo_oracle import Oracle, windowed

TINY = dataclasses.replace(
    TurboConfig.released(),
    latent_channels=6,
    block_channels=(4, 6, 8, 10),
    layers_per_block=(1, 2, 1, 1, 2),
)
TINY_STATISTICS = LatentStatistics(
    mean=(0.1, -0.2, 0.3, 0.0, 0.05, -0.4), std=(0.5, 1.1, 0.7, 0.9, 0.33, 1.3)
)
RELEASED_JSON = {
    "latent_channels": 48,
    "decoder_block_out_channels": [64, 128, 256, 512],
    "decoder_layers_per_block": [2, 2, 2, 3, 3],
    "decoder_spatio_temporal_scaling": [False, True, True, True],
    "decoder_spatio_only": [False, True, False, False],
    "decoder_causal": False,
    "decoder_is_dw_conv": [False, False, False, False],
    "decoder_norm": "rms",
    "encoder_causal": True,
    "patch_size": 2,
    "use_unpatchify": True,
    "first_chunk_size": 7,
    "step_size": 7,
}


def tiny(dtype=torch.float32, seed=0, config=TINY):
    decoder = TurboDecoder(config, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    for parameter in decoder.parameters():
        fan_in = max(1, parameter[0].numel()) if parameter.dim() > 1 else 10
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / fan_in**0.5)
    return decoder.eval()


def latent(frames, rows=2, columns=3, seed=1):
    return torch.randn(6, frames, rows, columns, generator=torch.Generator().manual_seed(seed))


def released_names():
    """Every tensor of the released checkpoint under `decoder.`, with its shape."""
    names = {}

    def conv(name, out, into, *kernel):
        names[f"{name}.weight"] = (out, into, *kernel)
        names[f"{name}.bias"] = (out,)

    def res(name, into, out):
        conv(f"{name}.conv1.conv", out, into, 3, 3, 3)
        conv(f"{name}.conv2.conv", out, out, 3, 3, 3)
        if into != out:
            conv(f"{name}.conv_shortcut.conv", out, into, 1, 1, 1)

    conv("conv_in.conv", 512, 48, 3, 3, 3)
    for index in range(3):
        res(f"mid_block.resnets.{index}", 512, 512)
    stages = [(512, 512, 3, "3d"), (512, 256, 2, "3d"), (256, 128, 2, "2d"), (128, 64, 2, None)]
    for block, (into, out, layers, upsampler) in enumerate(stages):
        name = f"up_blocks.{block}"
        if into != out:
            res(f"{name}.conv_in", into, out)
        if upsampler == "3d":
            conv(f"{name}.upsamplers.0.time_conv.conv", 2 * out, out, 3, 1, 1)
        if upsampler:
            conv(f"{name}.upsamplers.0.resample.1", out, out, 3, 3)
        for index in range(layers):
            res(f"{name}.resnets.{index}", out, out)
    conv("conv_out.conv", 12, 64, 3, 3, 3)
    return names


def test_released_names_and_sizes():
    state = TurboDecoder(TurboConfig.released(), device="meta").state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in state.items()} == released_names()
    assert len(state) == 80
    assert sum(tensor.numel() for tensor in state.values()) == 107_122_892
    assert all(tensor.dtype == torch.bfloat16 for tensor in state.values())


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("frames", [1, 3])
def test_one_window_matches_the_written_rules(frames, is_first):
    decoder = tiny(torch.float64)
    z = latent(frames).double()[None]
    out = decoder(z, is_first)
    assert out.shape == (1, 3, 4 * frames - 3 * is_first, 32, 48)
    expected = Oracle(decoder.state_dict(), TINY)(z, is_first)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("frames", [1, 6, 7, 8, 14, 15, 32])
def test_windows_match_the_written_rules(frames):
    """The decoder here is a sum over the window, so every border matters."""

    def decode(window, is_first):
        made = window.repeat_interleave(4, dim=1)[:3] + window.sum(dim=1, keepdim=True)[:3]
        return made[:, 3:] if is_first else made

    def batched(window, is_first):
        return decode(window[0], is_first)[None]

    z = latent(frames).double()
    out = torch.cat(list(decode_windows(decode, z)), dim=1)
    assert out.shape[1] == 4 * frames - 3
    assert torch.equal(out, windowed(batched, z[None])[0])


def test_the_released_clip_in_windows():
    plan = plan_windows(32)
    assert plan.padding == 3
    assert [(w.start, w.stop) for w in plan.windows] == [
        (0, 8), (6, 15), (13, 22), (20, 29), (27, 35),
    ]  # fmt: skip
    made = [4 * (w.stop - w.start) - 3 * w.is_first for w in plan.windows]
    kept = [n - w.drop_front - w.drop_back for n, w in zip(made, plan.windows, strict=True)]
    assert kept == [25, 28, 28, 28, 16]
    assert sum(kept) == 125


@pytest.mark.parametrize("frames", [*range(1, 40), 100])
@pytest.mark.parametrize(("first", "step"), [(7, 7), (3, 5), (1, 1)])
def test_every_clip_length_gives_its_frames_once(frames, first, step):
    """With a decoder that looks at one latent alone, windows change nothing."""

    def decode(window, is_first):
        numbered = window.repeat_interleave(4, dim=1) * 4 + torch.arange(4.0).repeat(
            window.shape[1]
        ).view(1, -1, 1, 1)
        return numbered[:, 3:] if is_first else numbered

    z = torch.arange(float(frames)).view(1, frames, 1, 1)
    out = torch.cat(list(decode_windows(decode, z, first, step)), dim=1)
    assert out.flatten().tolist() == list(range(3, 4 * frames))


def test_without_reach_in_time_windows_equal_the_whole_clip():
    decoder = tiny(torch.float64)
    for parameter in decoder.parameters():
        if parameter.dim() == 5 and parameter.shape[2] == 3:
            parameter[:, :, ::2] = 0
    z = latent(9).double()
    parts = decode_windows(lambda window, first: decoder(window[None], first)[0], z)
    whole = decoder(z[None], True)[0]
    torch.testing.assert_close(torch.cat(list(parts), dim=1), whole, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_clip_is_denormalised_windowed_and_truncated(dtype):
    decoder, z = tiny(dtype), latent(9)
    frames = decode_turbo(decoder, z, TINY_STATISTICS)
    assert (frames.dtype, frames.shape) == (torch.uint8, (33, 32, 48, 3))
    mean = torch.tensor(TINY_STATISTICS.mean).view(-1, 1, 1, 1)
    std = torch.tensor(TINY_STATISTICS.std).view(-1, 1, 1, 1)
    raw = (z.to(dtype).float() / (1 / std) + mean).to(dtype)
    pixels = windowed(decoder, raw[None])[0].float()
    expected = torch.clamp(pixels * 0.5 + 0.5, 0, 1) * 255
    assert torch.equal(frames, expected.to(torch.uint8).permute(1, 2, 3, 0))
    assert frames.unique().numel() > 50


def test_bytes_are_truncated_and_clamped():
    values = torch.tensor([-2.0, -1.0, 0.0, 0.9999, 1.0, 3.0])
    pixels = values.view(1, 1, 1, 6).expand(3, 1, 1, 6)
    assert to_bytes(pixels)[0, 0, :, 0].tolist() == [0, 0, 127, 254, 255, 255]


def test_nan_is_not_shown_as_black():
    pixels = torch.zeros(3, 1, 1, 2)
    pixels[1, 0, 0, 1] = float("nan")
    with pytest.raises(RuntimeError, match=r"hold NaN.*latents\.safetensors"):
        to_bytes(pixels)


def test_denormalisation_divides_by_the_rounded_inverse():
    z = torch.randn(48, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    mean = torch.tensor(WAN22_STATISTICS.mean).view(48, 1, 1, 1)
    std = torch.tensor(WAN22_STATISTICS.std).view(48, 1, 1, 1)
    raw = WAN22_STATISTICS.denormalise(z)
    assert torch.equal(raw, z / (1 / std) + mean)
    assert not torch.equal(raw, z * std + mean)
    torch.testing.assert_close(WAN22_STATISTICS.normalise(raw), z)
    assert WAN22_STATISTICS.mean[:3] == (-0.2289, -0.0052, -0.1323)
    assert WAN22_STATISTICS.std[:3] == (0.4765, 1.0364, 0.4514)
    assert len(WAN22_STATISTICS.std) == 48


def test_unpatchify_places_columns_before_rows():
    x = torch.arange(12.0).view(1, 12, 1, 1, 1)
    out = unpatchify(x, 2)[0, :, 0]
    assert out.tolist() == [
        [[0.0, 2.0], [1.0, 3.0]],
        [[4.0, 6.0], [5.0, 7.0]],
        [[8.0, 10.0], [9.0, 11.0]],
    ]


@pytest.mark.parametrize("form", ["ema", "state", "module", "bare", "safetensors"])
def test_checkpoints_of_every_form_load(tmp_path, form):
    decoder = tiny()
    named = {f"decoder.{name}": tensor for name, tensor in decoder.state_dict().items()}
    other = {name: torch.zeros_like(tensor) for name, tensor in named.items()}
    heads = {"discriminator.weight": torch.ones(2), "encoder.conv_in.conv.weight": torch.ones(1)}
    path = tmp_path / ("turbo.safetensors" if form == "safetensors" else "turbo.pth")
    match form:
        case "ema":
            torch.save({"ema_state_dict": {**named, **heads}, "state_dict": other, "step": 3}, path)
        case "state":
            torch.save({"state_dict": {**named, **heads}}, path)
        case "module":
            prefixed = {f"module.{name}": tensor for name, tensor in named.items()}
            torch.save({"ema_state_dict": prefixed}, path)
        case "bare":
            torch.save(named, path)
        case "safetensors":
            write_shard(path, named.items())
    loaded = load_turbo_decoder(path, dtype=torch.float32, config=TINY)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, decoder.state_dict()[name])
    z = latent(2)
    assert torch.equal(
        decode_turbo(loaded, z, TINY_STATISTICS), decode_turbo(decoder, z, TINY_STATISTICS)
    )
    assert load_turbo_decoder(path, config=TINY).dtype == torch.bfloat16


class Foreign:
    """Something whose unpickling would run code."""

    def __reduce__(self):
        return (print, ("ran",))


def test_faulty_checkpoints_are_refused(tmp_path, capsys):
    path = tmp_path / "turbo.pth"
    named = {f"decoder.{name}": tensor for name, tensor in tiny().state_dict().items()}
    del named["decoder.conv_out.conv.bias"]
    named["decoder.extra"] = torch.ones(1)
    named["decoder.conv_in.conv.bias"] = torch.ones(3)
    torch.save({"ema_state_dict": named}, path)
    with pytest.raises(
        ValueError,
        match=r"missing: conv_out\.conv\.bias; unexpected: extra; "
        r"of another shape: conv_in\.conv\.bias \(3,\), expected \(10,\)",
    ):
        load_turbo_decoder(path, config=TINY)
    torch.save({"state_dict": {"encoder.weight": torch.ones(1)}}, path)
    with pytest.raises(ValueError, match=r"no tensor under 'decoder\.'"):
        load_turbo_decoder(path, config=TINY)
    torch.save([1], path)
    with pytest.raises(ValueError, match="of type list"):
        load_turbo_decoder(path, config=TINY)
    torch.save({"args": Foreign()}, path)
    with pytest.raises(ValueError, match="safe to load"):
        load_turbo_decoder(path, config=TINY)
    assert "ran" not in capsys.readouterr().out
    for content in (b"no checkpoint", b"", b"PK\x03\x04", b"\x80\x02}q\x00."):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="safe to load"):
            load_turbo_decoder(path, config=TINY)
    torch.save({1: torch.ones(1)}, path)
    with pytest.raises(ValueError, match="of type dict with names of type int"):
        load_turbo_decoder(path, config=TINY)
    torch.save({"state_dict": {1: torch.ones(1)}}, path)
    with pytest.raises(ValueError, match="no tensor under"):
        load_turbo_decoder(path, config=TINY)
    with pytest.raises(ValueError, match="cannot be read"):
        load_turbo_decoder(tmp_path / "absent.pth", config=TINY)


def test_released_sizes_are_read_from_json(tmp_path):
    path = tmp_path / "turbo.json"
    path.write_text(json.dumps(RELEASED_JSON))
    assert TurboConfig.from_file(path) == TurboConfig.released()
    assert TurboConfig.released().spatial_scale == 16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step_size": None}, "lacks step_size"),
        ({"decoder_causal": True}, "turns on decoder_causal"),
        ({"decoder_is_dw_conv": [False, True]}, "turns on decoder_is_dw_conv"),
        ({"use_unpatchify": False}, "use_unpatchify=False"),
        ({"patch_size": 0}, "below 1"),
        ({"patch_size": "2"}, "expected a series of integers"),
        ({"decoder_spatio_only": [0, 1, 0, 0]}, "true and false"),
        ({"decoder_spatio_only": [True, True, True, False]}, "expected 4"),
        ({"decoder_layers_per_block": [2, 2, 2, 3]}, "one more"),
        ({"decoder_block_out_channels": [64, 128, 256]}, "for every block"),
    ],
)
def test_other_configs_are_refused(tmp_path, change, message):
    document = {
        key: value for key, value in {**RELEASED_JSON, **change}.items() if value is not None
    }
    path = tmp_path / "turbo.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=message):
        TurboConfig.from_file(path)


def test_latents_of_another_shape_are_refused():
    for wrong in (latent(2)[None], latent(2)[:5], latent(2)[:, :0]):
        with pytest.raises(ValueError, match=r"expected \(6, frames, rows"):
            decode_turbo(tiny(), wrong, TINY_STATISTICS)
    with pytest.raises(ValueError, match="positive numbers"):
        plan_windows(0)
    with pytest.raises(ValueError, match="48 channels first"):
        decode_turbo(tiny(), latent(2))
