"""The model call of a step: against the reference, against hand-packed input, and on many ranks."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from magi2 import presets
from magi2.denoiser import Denoiser, Velocities
from magi2.geometry import Geometry
from magi2.packing import Conditioning, ReferenceImage, pack_tokens, plan_tokens, time_columns
from magi2.sampler import SamplerState, draw_noise, sample
from magi2.settings import SamplingSettings
from magi2.topology import Topology
from tests.magi2.golden import golden_files
from tests.magi2.packed import sequence
from tests.magi2.sharded import SHARDED_RMS, check_sharded, model_of
from tests.magi2.test_golden_modules import load_model
from tests.ranks import run_ranks
from ulysses_comm.simulate import simulate, simulate_world

FLOAT32 = presets.tiny(torch.float32)
BFLOAT16 = presets.tiny(torch.bfloat16)
GEOMETRY = Geometry(latent_frames=2, latent_height=3, latent_width=4, audio_length=5)
SETTINGS = SamplingSettings(num_inference_steps=3)
# Velocities and the latents of a run of three steps, in which guidance grows every difference.
RUN_RMS = {dtype: 5 * rms for dtype, rms in SHARDED_RMS.items()}
NAMES = [field.name for field in dataclasses.fields(Velocities)]


def conditioning_of(config, lengths=(7, 1), num_images: int = 1) -> Conditioning:
    """The same random text and images whenever and on whichever rank it is called."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    prompt, negative = (draw(length, config.text_channels).bfloat16() for length in lengths)
    images = tuple(
        ReferenceImage(
            latent=draw(config.video_channels, 1, 2, 2),
            special_token=draw(config.text_channels).bfloat16(),
        )
        for _ in range(num_images)
    )
    return Conditioning(prompt=prompt, negative=negative, images=images)


def latents_of(config, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    return draw_noise(GEOMETRY, config.video_channels, config.audio_channels, seed)


def denoiser_of(config, topology=None, conditioning=None, **options) -> Denoiser:
    conditioning = conditioning or conditioning_of(config)
    return Denoiser(model_of(config, topology), GEOMETRY, conditioning, **options)


def joined(velocities: Velocities) -> torch.Tensor:
    """All numbers of all four in one vector."""
    return torch.cat([getattr(velocities, name).flatten() for name in NAMES])


def run(config, topology=None, conditioning=None, **options) -> torch.Tensor:
    """Velocities of one call, then the latents of a whole run, in one vector."""
    denoise = denoiser_of(config, topology, conditioning, **options)
    first = denoise(*latents_of(config), 700)
    last = sample(denoise, SamplerState.start(*latents_of(config)), SETTINGS)
    return torch.cat([joined(first), last.video.flatten(), last.audio.flatten()])


def run_on_mesh(config, conditioning=None, *, cfg_size: int = 2, **options) -> torch.Tensor:
    """The same on this rank of the world, with ranks of their own for each branch."""
    shape = (cfg_size, dist.get_world_size() // cfg_size)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("cfg", "sequence"))
    return run(config, Topology.of_mesh(mesh, cfg="cfg"), conditioning, **options)


def check_golden(golden, device: str = "cpu") -> Denoiser:
    """Compare a file's velocities with those of its latents and text, packed here."""
    video, audio = golden["in.video_latent"].to(device), golden["in.audio_latent"].to(device)
    geometry = Geometry(
        latent_frames=video.shape[2],
        latent_height=video.shape[3],
        latent_width=video.shape[4],
        audio_length=audio.shape[1],
    )
    conditioning = Conditioning(prompt=golden["in.text"][0], negative=golden["in.null_text"][0])
    denoise = Denoiser(load_model(golden).to(device), geometry, conditioning)
    velocities = denoise(video, audio, int(golden["in.timestep"]))
    pairs = {
        "video": (velocities.video_prompt, velocities.video_negative),
        "audio": (velocities.audio_prompt, velocities.audio_negative),
    }
    precision = "bf16" if golden.kind.endswith("bf16") else "fp32"
    for name, branches in pairs.items():
        assert all(branch.dtype == torch.float32 for branch in branches)
        golden.check(precision, f"out.unpacked_{name}", torch.cat(branches).cpu())
    assert torch.equal(denoise._x.cpu(), golden["in.x"])
    assert torch.equal(denoise.layout.coords.cpu(), golden["in.coords"])
    columns = time_columns(denoise.layout, int(golden["in.timestep"])).cpu()
    torch.testing.assert_close(columns, golden["in.time_token_sequence"], rtol=0, atol=2e-4)
    return denoise


@golden_files("model_cfg_pair_.*")
def test_velocities_match_the_reference(golden):
    check_golden(golden)


@pytest.mark.gpu
@golden_files("model_cfg_pair_.*")
def test_velocities_match_the_reference_on_a_gpu(golden):
    layout = check_golden(golden, "cuda").layout
    on_cpu = plan_tokens(layout.geometry, layout.text_lengths)
    for timestep in (0, 1, 412, 999):
        columns = time_columns(layout, timestep)
        assert columns.is_cuda
        assert torch.equal(columns.cpu(), time_columns(on_cpu, timestep))


@pytest.mark.parametrize("lengths", [(7, 1), (7, 0), (1, 1), (3, 9)])
def test_velocities_are_those_of_the_hand_packed_request(lengths):
    conditioning = conditioning_of(FLOAT32, lengths)
    video, audio = latents_of(FLOAT32)
    coords, modality = (
        torch.cat(parts)
        for parts in zip(*(sequence((2, 3, 4), 5, n, (2, 2)) for n in lengths), strict=True)
    )
    layout = plan_tokens(GEOMETRY, lengths, image_size=(2, 2), num_images=1)
    assert torch.equal(layout.coords, coords)
    assert torch.equal(layout.modality, modality.int())
    x = pack_tokens(layout, video, audio, conditioning)
    with torch.no_grad():
        rows = model_of(FLOAT32)(x, coords, modality, layout.cu_seqlens, time_columns(layout, 700))
    velocities = denoiser_of(FLOAT32, conditioning=conditioning)(video, audio, 700)
    begin = layout.cu_seqlens[1]
    for name, first, count, shape in [
        ("video_prompt", 0, 24, video.shape),
        ("audio_prompt", 24, 5, audio.shape),
        ("video_negative", begin, 24, video.shape),
        ("audio_negative", begin + 24, 5, audio.shape),
    ]:
        own = rows[first : first + count]
        if name.startswith("video"):
            own = own.T[: shape[1]].reshape(shape)
        else:
            own = own[None, :, : shape[2]]
        assert torch.equal(getattr(velocities, name), own), name


def test_a_denoiser_serves_every_step():
    denoise = denoiser_of(FLOAT32)
    first, other = latents_of(FLOAT32, 3), latents_of(FLOAT32, 4)
    expected = joined(denoiser_of(FLOAT32)(*first, 700))
    assert torch.equal(joined(denoise(*first, 700)), expected)
    changed = joined(denoise(*other, 700))
    later = joined(denoise(*first, 300))
    assert not torch.allclose(changed, expected, atol=1e-2)
    assert not torch.allclose(later, expected, atol=1e-2)
    assert torch.equal(joined(denoise(*first, 700)), expected)


def test_velocities_of_earlier_steps_stay_and_carry_no_graph():
    denoise = denoiser_of(FLOAT32)
    velocities = denoise(*latents_of(FLOAT32), 700)
    before = joined(velocities).clone()
    denoise(*latents_of(FLOAT32, 4), 700)
    assert torch.equal(joined(velocities), before)
    assert not any(getattr(velocities, name).requires_grad for name in NAMES)


@pytest.mark.parametrize("multiple", [48, 5])
def test_padding_changes_no_velocity(multiple):
    plain = denoiser_of(FLOAT32)(*latents_of(FLOAT32), 700)
    denoise = denoiser_of(FLOAT32, pad_to_multiple_of=multiple)
    assert denoise.layout.num_padding
    assert denoise.layout.num_tokens % multiple == 0
    check_sharded([joined(denoise(*latents_of(FLOAT32), 700))], joined(plain), torch.float32)


def test_text_and_images_matter_to_their_branch():
    video, audio = latents_of(FLOAT32)
    whole = conditioning_of(FLOAT32)
    plain = denoiser_of(FLOAT32)(video, audio, 700)
    other = dataclasses.replace(whole, negative=whole.negative + 1)
    changed = denoiser_of(FLOAT32, conditioning=other)(video, audio, 700)
    torch.testing.assert_close(changed.video_prompt, plain.video_prompt, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(changed.video_negative, plain.video_negative, atol=1e-3)
    hidden = dataclasses.replace(whole, use_images_without_prompt=False)
    changed = denoiser_of(FLOAT32, conditioning=hidden)(video, audio, 700)
    torch.testing.assert_close(changed.audio_prompt, plain.audio_prompt, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(changed.audio_negative, plain.audio_negative, atol=1e-3)


@pytest.mark.parametrize("multiple", [None, 48])
@pytest.mark.parametrize("world_size", [2, 8])
def test_all_ranks_get_the_same_bits_close_to_those_of_one(world_size, multiple):
    options = {"pad_to_multiple_of": multiple}
    results = simulate(
        world_size, lambda group: run(FLOAT32, Topology.of_group(group), **options)
    ).results
    check_sharded(results, run(FLOAT32, **options), torch.float32, RUN_RMS)


@pytest.mark.parametrize("world_size", [2, 8])
def test_all_ranks_get_the_same_bits_in_bfloat16(world_size):
    results = simulate(world_size, lambda group: run(BFLOAT16, Topology.of_group(group))).results
    check_sharded(results, run(BFLOAT16), torch.bfloat16, RUN_RMS)


@pytest.mark.parametrize("multiple", [None, 48])
@pytest.mark.parametrize("lengths", [(7, 0), (3, 9)])
def test_branches_on_their_own_ranks_give_every_rank_the_same_bits(lengths, multiple):
    conditioning = conditioning_of(FLOAT32, lengths)
    options = {"pad_to_multiple_of": multiple}
    results = simulate_world(4, lambda: run_on_mesh(FLOAT32, conditioning, **options)).results
    packed = run(FLOAT32, None, conditioning)
    check_sharded(results, packed, torch.float32, RUN_RMS)


def run_on_group(group) -> torch.Tensor:
    return run(FLOAT32, Topology.of_group(group))


@pytest.mark.gloo
def test_real_ranks_get_the_bits_of_simulated_ones():
    (simulated, _), real = simulate(2, run_on_group).results, run_ranks(run_on_group, 2)
    assert all(torch.equal(result, simulated) for result in real)


def test_a_padding_of_no_tokens_still_counts_as_a_sequence_of_its_branch():
    # 24 video, 5 audio, 7 text and 5 image tokens: 41; the other branch has 40.
    conditioning = conditioning_of(FLOAT32, (7, 6))
    options = {"pad_to_multiple_of": 40}
    results = simulate_world(2, lambda: run_on_mesh(FLOAT32, conditioning, **options)).results
    check_sharded(results, run(FLOAT32, None, conditioning), torch.float32, RUN_RMS)


def test_rejects_conditioning_of_another_checkpoint():
    narrow = Conditioning(prompt=torch.randn(3, 23), negative=torch.randn(2, 23))
    with pytest.raises(ValueError, match="the text has 23 channels and the model takes 24"):
        denoiser_of(FLOAT32, conditioning=narrow)
    image = ReferenceImage(latent=torch.randn(7, 1, 2, 2), special_token=torch.randn(24))
    text = torch.randn(3, 24)
    wrong = Conditioning(prompt=text, negative=text, images=(image,))
    with pytest.raises(ValueError, match="the image has 7 channels and the model takes 8"):
        denoiser_of(FLOAT32, conditioning=wrong)


def test_rejects_latents_of_another_clip():
    denoise = denoiser_of(FLOAT32)
    video, audio = latents_of(FLOAT32)
    with pytest.raises(ValueError, match=r"video is .*expected \(1, 8, 2, 3, 4\)"):
        denoise(video[:, :, :1], audio, 700)
    with pytest.raises(ValueError, match=r"audio is .*expected \(1, 5, 6\)"):
        denoise(video, audio[:, 1:], 700)
