"""Guidance and its options against plain loops over numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from magi2.guidance import guide, guide_audio, guide_video, skim
from magi2.settings import SamplingSettings

VIDEO_SHAPE = (1, 3, 4, 2, 3)
AUDIO_SHAPE = (1, 6, 5)


def draw(shape, count: int = 3) -> list[torch.Tensor]:
    """Conditional velocity, unconditional velocity, latent."""
    return [torch.randn(shape) for _ in range(count)]


def skimmed(c, u, x, g, s) -> np.float32:
    """The unconditional number that one conditional number is guided with, in float32."""
    c, u, x, g, s, one = (np.float32(number) for number in (c, u, x, g, s, 1))

    def overshoots(a, b) -> bool:
        y = x - ((x - b) + g * ((x - a) - (x - b)))
        return bool(
            np.sign(a - b) == np.sign(a)
            and np.sign(a) == np.sign(g * a - (g - one) * b)
            and np.sign(y) == np.sign(y - x)
        )

    if g <= 1:
        return u
    kept = (s - one) / (g - one)
    if overshoots(c, u):
        u = (one - kept) * c + kept * u
    if overshoots(u, c):
        u = (one - kept) * c + kept * u
    return u


def test_released_settings_are_the_two_formulas():
    settings = SamplingSettings()
    c, u, x = draw(VIDEO_SHAPE)
    assert torch.equal(guide_video(c, u, x, 999, settings), u + 5.0 * (c - u))
    c, u, x = draw(AUDIO_SHAPE)
    assert torch.equal(guide_audio(c, u, x, settings), u + 7.0 * (c - u))


def test_branches_that_agree_are_left_as_they_are():
    (c,) = draw(VIDEO_SHAPE, 1)
    assert torch.equal(guide(c, c, 5.0), c)


@pytest.mark.parametrize(("scale", "expected"), [(5.0, [2.0, 2.0, 5.0, 5.0]), (1.5, [1.5] * 4)])
def test_first_frames_have_a_smaller_scale(scale, expected):
    settings = SamplingSettings(
        video_guidance_scale=scale,
        use_cfg_trick=True,
        cfg_trick_start_frame=2,
        cfg_trick_value=2.0,
    )
    c, u, x = draw(VIDEO_SHAPE)
    guided = guide_video(c, u, x, 500, settings)
    for frame, number in enumerate(expected):
        at = (slice(None), slice(None), frame)
        assert torch.equal(guided[at], u[at] + number * (c[at] - u[at]))
    c, u, x = draw(AUDIO_SHAPE)
    assert torch.equal(guide_audio(c, u, x, settings), u + 7.0 * (c - u))


def test_a_trick_that_is_longer_than_the_clip_holds_for_all_frames():
    settings = SamplingSettings(use_cfg_trick=True, cfg_trick_start_frame=100, cfg_trick_value=2.0)
    c, u, x = draw(VIDEO_SHAPE)
    assert torch.equal(guide_video(c, u, x, 500, settings), u + 2.0 * (c - u))


@pytest.mark.parametrize(("timestep", "expected"), [(999, 5.0), (500, 5.0), (499, 3.0), (0, 3.0)])
def test_late_steps_have_a_smaller_scale(timestep, expected):
    settings = SamplingSettings(
        use_dynamic_cfg=True, dynamic_cfg_start_t=500, dynamic_cfg_cutoff_value=3.0
    )
    c, u, x = draw(VIDEO_SHAPE)
    assert torch.equal(guide_video(c, u, x, timestep, settings), u + expected * (c - u))
    c, u, x = draw(AUDIO_SHAPE)
    assert torch.equal(guide_audio(c, u, x, settings), u + 7.0 * (c - u))


def test_a_cutoff_never_raises_the_scale():
    settings = SamplingSettings(
        use_dynamic_cfg=True, dynamic_cfg_start_t=500, dynamic_cfg_cutoff_value=9.0
    )
    c, u, x = draw(VIDEO_SHAPE)
    assert torch.equal(guide_video(c, u, x, 0, settings), u + 5.0 * (c - u))


def test_the_smaller_of_two_caps_holds():
    settings = SamplingSettings(
        use_cfg_trick=True,
        cfg_trick_start_frame=1,
        cfg_trick_value=2.0,
        use_dynamic_cfg=True,
        dynamic_cfg_start_t=500,
        dynamic_cfg_cutoff_value=1.5,
    )
    c, u, x = draw(VIDEO_SHAPE)
    assert torch.equal(guide_video(c, u, x, 0, settings), u + 1.5 * (c - u))


@pytest.mark.parametrize("amount", [0.3, 1.0])
@pytest.mark.parametrize("shape", [VIDEO_SHAPE, AUDIO_SHAPE])
def test_rescaling_brings_each_channel_to_the_conditional_deviation(amount, shape):
    settings = SamplingSettings(cfg_rescale=amount)
    c, u, x = draw(shape)
    if shape == VIDEO_SHAPE:
        guided, plain = guide_video(c, u, x, 9, settings), (u + 5.0 * (c - u)).double().numpy()
        channels = [(0, channel) for channel in range(shape[1])]
    else:
        guided, plain = guide_audio(c, u, x, settings), (u + 7.0 * (c - u)).double().numpy()
        channels = [(0, slice(None), channel) for channel in range(shape[2])]
    for at in channels:
        factor = amount * np.std(c.double().numpy()[at]) / np.std(plain[at]) + 1 - amount
        np.testing.assert_allclose(guided[at].numpy(), plain[at] * factor, rtol=1e-5, atol=1e-6)
        if amount == 1.0:
            assert float(guided[at].std()) == pytest.approx(float(c[at].std()), rel=1e-5)


def test_rescaling_a_constant_channel_stays_finite():
    c, u = torch.ones(AUDIO_SHAPE), torch.zeros(AUDIO_SHAPE)
    guided = guide_audio(c, u, c, SamplingSettings(cfg_rescale=0.5))
    assert torch.equal(guided, torch.full(AUDIO_SHAPE, 3.5))  # half of 7, and no deviation


@pytest.mark.parametrize("scale", [5.0, 1.5, 1.0, 0.5, 0.0])
def test_skimming_matches_a_plain_loop(scale):
    shape = (1, 40, 50)
    c, u, x = draw(shape)
    c[:, :2], u[:, 1:3] = 0.0, 0.0
    result = skim(c, u, x, scale, 2.5)
    numbers = (t.flatten().tolist() for t in (c, u, x))
    expected = [skimmed(*three, scale, 2.5) for three in zip(*numbers, strict=True)]
    np.testing.assert_allclose(result.flatten().numpy(), expected, rtol=1e-6, atol=0)
    changed = (result != u).float().mean()
    assert 0.02 < changed < 0.98 if scale > 1 else changed == 0


def test_skimmed_numbers_are_guided_at_the_skim_scale():
    c, u, x = draw((1, 40, 50))
    result = skim(c, u, x, 5.0, 2.0)
    guided = guide(c, result, 5.0)
    kept = 0.25
    once = (result != u) & torch.isclose(result, (1 - kept) * c + kept * u)
    assert once.any()
    torch.testing.assert_close(guided[once], guide(c, u, 2.0)[once], rtol=1e-4, atol=1e-4)


def test_skimming_leaves_a_negative_velocity_of_zeros():
    c, _, x = draw((1, 40, 50))
    zeros = torch.zeros_like(c)
    assert torch.equal(skim(c, zeros, x, 5.0, 2.0), zeros)
    nearly = zeros.clone()
    nearly[0, 0, 0] = 1e-3
    assert not torch.equal(skim(c, nearly, x, 5.0, 2.0), nearly)


def test_skimming_takes_a_scale_for_each_frame():
    settings = SamplingSettings(
        use_cfg_trick=True,
        cfg_trick_start_frame=2,
        cfg_trick_value=1.0,
        use_skimmed_cfg=True,
        skimmed_cfg_scale=2.0,
    )
    c, u, x = draw(VIDEO_SHAPE)
    guided = guide_video(c, u, x, 9, settings)
    assert torch.equal(guided[:, :, :2], guide(c, u, 1.0)[:, :, :2])  # at 1 nothing is skimmed
    skimmed_part = guide(c, skim(c, u, x, 5.0, 2.0), 5.0)
    assert torch.equal(guided[:, :, 2:], skimmed_part[:, :, 2:])
    assert not torch.equal(skimmed_part, guide(c, u, 5.0))


def test_audio_is_skimmed_too_and_rescaled_after_it():
    settings = SamplingSettings(use_skimmed_cfg=True, skimmed_cfg_scale=2.0, cfg_rescale=1.0)
    c, u, x = draw(AUDIO_SHAPE)
    guided = guide_audio(c, u, x, settings)
    plain = guide(c, skim(c, u, x, 7.0, 2.0), 7.0)
    factor = c.std(1, correction=0) / plain.std(1, correction=0)
    torch.testing.assert_close(guided, plain * factor[:, None])


@given(scale=st.floats(0, 20), seed=st.integers(0, 1000))
def test_options_that_change_nothing_change_no_bit(scale, seed):
    generator = torch.Generator().manual_seed(seed)
    c, u, x = (torch.randn(VIDEO_SHAPE, generator=generator) for _ in range(3))
    plain = SamplingSettings(video_guidance_scale=scale)
    options = SamplingSettings(
        video_guidance_scale=scale,
        use_cfg_trick=True,
        cfg_trick_start_frame=2,
        cfg_trick_value=scale,
        use_dynamic_cfg=True,
        dynamic_cfg_start_t=1000,
        dynamic_cfg_cutoff_value=scale + 1,
    )
    assert torch.equal(guide_video(c, u, x, 9, options), guide_video(c, u, x, 9, plain))
