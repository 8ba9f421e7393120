"""The denoising loop against the reference's run; noise, states, and going on from every step."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load, save

from magi2.denoiser import Velocities
from magi2.geometry import Geometry
from magi2.guidance import guide_audio, guide_video
from magi2.sampler import (
    SamplerState,
    draw_noise,
    sample,
    state_from_tensors,
    state_to_tensors,
)
from magi2.schedule import flow_timesteps, make_solver
from magi2.settings import SamplingSettings
from tests.magi2.golden import GoldenFile, golden_files

GEOMETRY = Geometry(latent_frames=3, latent_height=2, latent_width=2, audio_length=5)
PLAIN = SamplingSettings(num_inference_steps=5)
EVERY_OPTION = SamplingSettings(
    num_inference_steps=5,
    cfg_rescale=0.4,
    use_cfg_trick=True,
    cfg_trick_start_frame=1,
    cfg_trick_value=2.0,
    use_dynamic_cfg=True,
    dynamic_cfg_start_t=960,
    dynamic_cfg_cutoff_value=3.0,
    use_skimmed_cfg=True,
    skimmed_cfg_scale=2.0,
)


def curved(video: torch.Tensor, audio: torch.Tensor, timestep: int) -> Velocities:
    """Velocities that depend on every number of a latent and on the time."""
    time = timestep / 1000
    return Velocities(
        video_prompt=torch.sin(3 * video) + time * video.roll(1, 1),
        video_negative=0.5 * video - time,
        audio_prompt=torch.cos(2 * audio) * time,
        audio_negative=audio.roll(1, 1) / 3 + 0.1,
    )


def start(device: str = "cpu") -> SamplerState:
    return SamplerState.start(*draw_noise(GEOMETRY, 4, 3, seed=7, device=device))


def steps_of(denoise, state: SamplerState, settings: SamplingSettings) -> list[SamplerState]:
    """The states after each step that is left."""
    states: list[SamplerState] = []
    last = sample(denoise, state, settings, states.append)
    assert not states or last is states[-1]
    return states


def check_same(actual: SamplerState, expected: SamplerState) -> None:
    """Every number of both states has the same bits."""
    (tensors, strings), (others, other_strings) = map(state_to_tensors, (actual, expected))
    assert strings == other_strings
    assert sorted(tensors) == sorted(others)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, others[name]), name


class Toy:
    """The golden file's linear velocity, and what guidance made of it at each step."""

    def __init__(self, golden: GoldenFile, guided: bool) -> None:
        self.golden = golden
        self.guided = guided
        self.latents: list[tuple[torch.Tensor, torch.Tensor, int]] = []

    def velocity(self, name: str, latent: torch.Tensor, timestep: int, factor: float):
        shape = [1] * latent.dim()
        shape[1 if name == "video" else -1] = -1
        slope, offset = (
            self.golden[f"in.toy.{name}_{part}"].view(shape) for part in ("slope", "offset")
        )
        return factor * slope * (0.5 + 0.5 * timestep / 1000) * latent + offset

    def __call__(self, video, audio, timestep: int) -> Velocities:
        self.latents.append((video, audio, timestep))
        factor = 0.95 if self.guided else 1.0
        return Velocities(
            video_prompt=self.velocity("video", video, timestep, 1.0),
            video_negative=self.velocity("video", video, timestep, factor),
            audio_prompt=self.velocity("audio", audio, timestep, 1.0),
            audio_negative=self.velocity("audio", audio, timestep, factor),
        )


def golden_settings(golden: GoldenFile) -> SamplingSettings:
    config = golden.config
    return SamplingSettings(
        num_inference_steps=config["num_inference_steps"],
        shift=config["shift"],
        video_guidance_scale=config["video_guidance"],
        audio_guidance_scale=config["audio_guidance"],
    )


@golden_files("trajectory")
def test_guided_run_matches_the_reference(golden):
    settings, toy = golden_settings(golden), Toy(golden, guided=True)
    begin = SamplerState.start(golden["in.video_latent"], golden["in.audio_latent"])
    states = steps_of(toy, begin, settings)
    for name in ("video", "audio"):
        latents = torch.stack([getattr(state, name) for state in states])
        golden.check("fp32", f"out.{name}_steps", latents, 1e-6)
        golden.check("fp32", f"out.{name}_final", latents[-1], 1e-6)
    timesteps = [timestep for _, _, timestep in toy.latents]
    assert timesteps == golden["mid.timesteps"].tolist()
    assert torch.equal(make_solver(settings).sigmas, golden["mid.sigmas"])
    video, audio = [], []
    for video_latent, audio_latent, timestep in list(toy.latents):
        v = toy(video_latent, audio_latent, timestep)
        video.append(
            guide_video(v.video_prompt, v.video_negative, video_latent, timestep, settings)
        )
        audio.append(guide_audio(v.audio_prompt, v.audio_negative, audio_latent, settings))
    golden.check("fp32", "out.video_velocity_steps", torch.stack(video), 2e-6)
    golden.check("fp32", "out.audio_velocity_steps", torch.stack(audio), 2e-6)


@golden_files("trajectory")
def test_unguided_run_matches_the_reference(golden):
    begin = SamplerState.start(golden["in.video_latent"], golden["in.audio_latent"])
    states = steps_of(Toy(golden, guided=False), begin, golden_settings(golden))
    latents = torch.stack([state.video for state in states])
    golden.check("fp32", "out.direct_video_steps", latents, 1e-6)


def test_every_step_calls_once_with_the_current_latents():
    calls = []

    def recording(video, audio, timestep):
        calls.append((video, audio, timestep))
        return curved(video, audio, timestep)

    begin = start()
    states = steps_of(recording, begin, PLAIN)
    assert [timestep for _, _, timestep in calls] == flow_timesteps(5, 7.0)
    assert [state.step for state in states] == [1, 2, 3, 4, 5]
    for (video, audio, _), state in zip(calls, [begin, *states[:-1]], strict=True):
        assert video is state.video
        assert audio is state.audio


def check_going_on(settings: SamplingSettings, device: str = "cpu") -> None:
    """Stop after every step, store the state as bytes, and go on with it."""
    states = steps_of(curved, start(device), settings)
    assert not torch.equal(states[-1].video, states[-2].video)
    for done, state in enumerate(states, start=1):
        tensors, strings = state_to_tensors(state)
        again = state_from_tensors(load(save(tensors, strings)), strings, device)
        check_same(again, state)
        rest = steps_of(curved, again, settings)
        assert len(rest) == 5 - done
        for actual, expected in zip(rest, states[done:], strict=True):
            check_same(actual, expected)


@pytest.mark.parametrize("settings", [PLAIN, EVERY_OPTION], ids=["plain", "every option"])
def test_going_on_from_every_step_gives_the_same_bits(settings):
    check_going_on(settings)


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [PLAIN, EVERY_OPTION], ids=["plain", "every option"])
def test_going_on_gives_the_same_bits_on_a_gpu(settings):
    check_going_on(settings, "cuda")


def test_a_kept_state_is_not_changed_by_going_on():
    kept = []

    def keep(state):
        kept.append((state, {k: t.clone() for k, t in state_to_tensors(state)[0].items()}))

    sample(curved, start(), PLAIN, keep)
    for state, copies in kept:
        for name, tensor in state_to_tensors(state)[0].items():
            assert torch.equal(tensor, copies[name])


def test_the_state_before_the_first_step_can_be_stored_too():
    begin = start()
    again = state_from_tensors(*state_to_tensors(begin))
    assert again.video.data_ptr() != begin.video.data_ptr()
    check_same(sample(curved, again, PLAIN), sample(curved, begin, PLAIN))


def test_a_finished_run_has_nothing_left_to_do():
    last = sample(curved, start(), PLAIN)

    def fail(*_):
        raise AssertionError("a step too many")

    assert sample(fail, last, PLAIN, fail) is last


def test_options_of_guidance_reach_both_latents():
    plain, other = (sample(curved, start(), settings) for settings in (PLAIN, EVERY_OPTION))
    assert not torch.allclose(plain.video, other.video, atol=1e-2)
    assert not torch.allclose(plain.audio, other.audio, atol=1e-2)


def test_noise_is_that_of_the_global_generators_video_first():
    torch.manual_seed(42)
    expected = torch.randn(1, 4, 3, 2, 2), torch.randn(1, 5, 3)
    before = torch.get_rng_state()
    noise = draw_noise(GEOMETRY, 4, 3, seed=42)
    assert torch.equal(torch.get_rng_state(), before)
    for actual, other in zip(noise, expected, strict=True):
        assert actual.dtype == torch.float32
        assert torch.equal(actual, other)
    assert not torch.equal(draw_noise(GEOMETRY, 4, 3, seed=43)[0], expected[0])


@pytest.mark.gpu
def test_noise_on_a_gpu_is_that_of_its_global_generator():
    torch.manual_seed(42)
    expected = (torch.randn(shape, device="cuda") for shape in ((1, 4, 3, 2, 2), (1, 5, 3)))
    pairs = zip(draw_noise(GEOMETRY, 4, 3, seed=42, device="cuda"), expected, strict=True)
    assert all(torch.equal(actual, other) for actual, other in pairs)


@pytest.mark.parametrize("seed", [-1, 2**63, 1.0, True, None])
def test_rejects_seeds_that_are_none(seed):
    with pytest.raises(ValueError, match="seed="):
        draw_noise(GEOMETRY, 4, 3, seed)


@pytest.mark.parametrize("part", ["video_prompt", "video_negative", "audio_prompt"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_velocity_that_is_not_finite_ends_the_run_with_its_step(part, value):
    def broken(video, audio, timestep):
        velocities = curved(video, audio, timestep)
        if timestep == flow_timesteps(5, 7.0)[2]:
            getattr(velocities, part).view(-1)[3] = value
        return velocities

    done = []
    message = f"the {part.partition('_')[0]} velocity of step 3 holds NaN"
    with pytest.raises(RuntimeError, match=message):
        sample(broken, start(), PLAIN, done.append)
    assert len(done) == 2


def test_a_velocity_of_another_shape_ends_the_run():
    def broken(video, audio, timestep):
        velocities = curved(video, audio, timestep)
        wide = velocities.audio_prompt.repeat(2, 1, 1)
        return Velocities(**{**vars(velocities), "audio_prompt": wide})

    with pytest.raises(RuntimeError, match="the audio velocity of step 1 is"):
        sample(broken, start(), PLAIN)


def test_rejects_a_state_of_a_longer_run():
    last = sample(curved, start(), PLAIN)
    with pytest.raises(ValueError, match=r"has done 5 steps.*from 0 to 4"):
        sample(curved, last, SamplingSettings(num_inference_steps=4))
    mixed = SamplerState(**{**vars(last), "audio_solver": start().audio_solver})
    with pytest.raises(ValueError, match=r"its solvers \[5, 0\]"):
        sample(curved, mixed, PLAIN)


def without(name):
    def change(tensors, metadata):
        del (tensors if name in tensors else metadata)[name]

    return change


def tensor_becomes(name, function):
    def change(tensors, metadata):
        tensors[name] = function(tensors["video"])

    return change


def string_becomes(name, value):
    def change(tensors, metadata):
        metadata[name] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("video"), "has a video latent of type NoneType"),
        (without("video_solver.corrected_sample"), "state of step 2 holds"),
        (without("state_format"), "format None: expected '1'"),
        (without("audio_solver"), "audio_solver=None"),
        (tensor_becomes("more", torch.clone), r"unknown tensors \['more'\]"),
        (tensor_becomes("audio", lambda x: x.double()), "audio latent .*expected 3"),
        (tensor_becomes("video", lambda x: x.half()), "video latent .*float16"),
        (tensor_becomes("video_solver.corrected_sample", lambda x: x[:, :1]), "as the video"),
        (tensor_becomes("audio_solver.more", lambda x: x[0, :, 0]), "audio_solver.more"),
        (string_becomes("step", "3"), "is of step '3' and its video solver's of 2"),
        (string_becomes("video_solver", "[1]"), "expected a JSON object of integers"),
        (string_becomes("video_solver", '{"step": true}'), "expected a JSON object of integers"),
        (string_becomes("video_solver", "{"), "expected a JSON object of integers"),
        (string_becomes("audio_solver", json.dumps({"step": 1})), r"its solvers \[2, 1\]"),
    ],
)
def test_rejects_a_damaged_state(change, message):
    state = steps_of(curved, start(), PLAIN)[1]
    tensors, metadata = state_to_tensors(state)
    change(tensors, metadata)
    with pytest.raises(ValueError, match=message):
        sample(curved, state_from_tensors(tensors, metadata), PLAIN)


def test_further_strings_are_left_alone():
    state = steps_of(curved, start(), PLAIN)[1]
    tensors, metadata = state_to_tensors(state)
    check_same(state_from_tensors(tensors, {**metadata, "run": "mine"}), state)
