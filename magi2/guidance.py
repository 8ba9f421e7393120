"""Guidance: from what the model says with and without the prompt to one velocity.

All functions take float32 tensors of one shape: video (1, channels, frames, rows, columns), audio
(1, audio latents, channels).
"""

from __future__ import annotations

import torch

from magi2.settings import SamplingSettings

# Dimensions over which a channel's deviation is taken.
_VIDEO_DIMS = (2, 3, 4)
_AUDIO_DIMS = (1,)
_MIN_DEVIATION = 1e-6


def guide(
    prompt: torch.Tensor, negative: torch.Tensor, scale: float | torch.Tensor
) -> torch.Tensor:
    """Go from the negative velocity towards the prompt's, `scale` times their difference."""
    return negative + scale * (prompt - negative)


def guide_video(
    prompt: torch.Tensor,
    negative: torch.Tensor,
    latent: torch.Tensor,
    timestep: int,
    settings: SamplingSettings,
) -> torch.Tensor:
    """Guided velocity of the video with the options that are on.

    Args:
        prompt: Velocity of the conditional branch.
        negative: Velocity of the unconditional branch.
        latent: What both were computed from.
        timestep: From 0 to 1000.
        settings: Scale and options.
    """
    scale = video_scale(prompt, timestep, settings)
    return _guide(prompt, negative, latent, scale, settings, _VIDEO_DIMS)


def guide_audio(
    prompt: torch.Tensor,
    negative: torch.Tensor,
    latent: torch.Tensor,
    settings: SamplingSettings,
) -> torch.Tensor:
    """Guided velocity of the audio; arguments as `guide_video`'s."""
    scale = settings.audio_guidance_scale
    return _guide(prompt, negative, latent, scale, settings, _AUDIO_DIMS)


def video_scale(
    video: torch.Tensor, timestep: int, settings: SamplingSettings
) -> float | torch.Tensor:
    """The video's scale at this timestep: one number, or one for each latent frame.

    Returns:
        A number, or (frames, 1, 1) float32 where the first frames have a scale of their own.
    """
    scale = settings.video_guidance_scale
    if settings.use_dynamic_cfg:
        assert settings.dynamic_cfg_start_t is not None
        assert settings.dynamic_cfg_cutoff_value is not None
        if timestep < settings.dynamic_cfg_start_t:
            scale = min(scale, settings.dynamic_cfg_cutoff_value)
    if not settings.use_cfg_trick:
        return scale
    assert settings.cfg_trick_start_frame is not None
    assert settings.cfg_trick_value is not None
    scales = torch.full((video.shape[2], 1, 1), scale, dtype=torch.float32, device=video.device)
    scales[: settings.cfg_trick_start_frame] = min(settings.cfg_trick_value, scale)
    return scales


def rescale(
    guided: torch.Tensor, prompt: torch.Tensor, amount: float, dims: tuple[int, ...]
) -> torch.Tensor:
    """Bring each channel's deviation towards that of the prompt's velocity.

    Args:
        guided: Guided velocity.
        prompt: Velocity of the conditional branch.
        amount: From 0, not at all, to 1, all the way.
        dims: Dimensions over which the population's deviation is taken.
    """
    wanted = prompt.std(dims, correction=0, keepdim=True)
    actual = guided.std(dims, correction=0, keepdim=True).clamp(min=_MIN_DEVIATION)
    return guided * (amount * wanted / actual + 1 - amount)


def skim(
    prompt: torch.Tensor,
    negative: torch.Tensor,
    latent: torch.Tensor,
    scale: float | torch.Tensor,
    skim_scale: float,
) -> torch.Tensor:
    """Hold guidance back where it would overshoot, by moving the negative velocity.

    There the guided velocity is as if the scale were `skim_scale`. Nothing changes where the scale
    is 1 or less, or if the negative velocity is all zeros.

    Returns:
        The negative velocity to guide with.
    """
    scale = torch.as_tensor(scale, dtype=torch.float32, device=prompt.device)
    applies = (scale > 1) & negative.any()
    # Where the scale is 1 the quotient is not used.
    kept = (skim_scale - 1) / torch.where(scale > 1, scale - 1, 1.0)
    for swapped in (False, True):
        pair = (negative, prompt) if swapped else (prompt, negative)
        moved = (1 - kept) * prompt + kept * negative
        negative = torch.where(applies & _overshoots(*pair, latent, scale), moved, negative)
    return negative


def _overshoots(
    towards: torch.Tensor, away: torch.Tensor, latent: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    # By way of the latent, with the rounding that it implies, as the reference has it.
    guided = latent - ((latent - away) + scale * ((latent - towards) - (latent - away)))
    sign = towards.sign()
    return (
        ((towards - away).sign() == sign)
        & (sign == (scale * towards - (scale - 1) * away).sign())
        & (guided.sign() == (guided - latent).sign())
    )


def _guide(
    prompt: torch.Tensor,
    negative: torch.Tensor,
    latent: torch.Tensor,
    scale: float | torch.Tensor,
    settings: SamplingSettings,
    dims: tuple[int, ...],
) -> torch.Tensor:
    if settings.use_skimmed_cfg:
        assert settings.skimmed_cfg_scale is not None
        negative = skim(prompt, negative, latent, scale, settings.skimmed_cfg_scale)
    guided = guide(prompt, negative, scale)
    if settings.cfg_rescale:
        guided = rescale(guided, prompt, settings.cfg_rescale, dims)
    return guided
