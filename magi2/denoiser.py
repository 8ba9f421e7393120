"""One model call of a step: both branches' velocities of the current latents."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from magi2.geometry import Geometry
from magi2.packing import (
    TIME_CHANNELS,
    Conditioning,
    pack_tokens,
    plan_tokens,
    time_columns,
    unpack_tokens,
    write_latents,
)
from magi2.transformer import Magi2Transformer


@dataclass(frozen=True, kw_only=True)
class Velocities:
    """What the model says of both latents, float32 of their shapes.

    Args:
        video_prompt: Of the conditional branch, (1, video channels, frames, rows, columns).
        video_negative: Of the unconditional branch.
        audio_prompt: Of the conditional branch, (1, audio latents, audio channels).
        audio_negative: Of the unconditional branch.
    """

    video_prompt: torch.Tensor
    video_negative: torch.Tensor
    audio_prompt: torch.Tensor
    audio_negative: torch.Tensor


class Denoiser:
    """A model with one request, planned and packed once; called with the latents of each step.

    On several ranks every rank makes one from the same request, is called with the same latents,
    and returns the same velocities, bit for bit.

    Args:
        model: With its weights.
        geometry: The clip.
        conditioning: Text and images, on any device.
        pad_to_multiple_of: As in `plan_tokens`. Branches that have their own ranks are padded each
            for itself.
        time_channels: Columns in which the model is told the time; 64 as released.

    Raises:
        ValueError: If the conditioning's channels are not the model's.

    Between calls it keeps the packed input, (tokens, widest channels) float32, on every rank.
    """

    def __init__(
        self,
        model: Magi2Transformer,
        geometry: Geometry,
        conditioning: Conditioning,
        *,
        pad_to_multiple_of: int | None = None,
        time_channels: int = TIME_CHANNELS,
    ) -> None:
        _check_channels(model, conditioning)
        device = model.pre_adapter.rope.bands.device
        self.model = model
        self.time_channels = time_channels
        self.layout = plan_tokens(
            geometry,
            conditioning.text_lengths,
            image_size=conditioning.image_size,
            num_images=len(conditioning.images),
            pad_to_multiple_of=pad_to_multiple_of,
            pad_each_branch=model.topology.cfg_size > 1,
            device=device,
        )
        self.plan = model.plan(self.layout.coords, self.layout.modality, self.layout.cu_seqlens)
        config = model.config
        video = torch.zeros(geometry.video_shape(config.video_channels), device=device)
        audio = torch.zeros(geometry.audio_shape(config.audio_channels), device=device)
        # Text and images stay as they are from step to step; the latents are written over.
        self._x = pack_tokens(self.layout, video, audio, conditioning.to(device))

    @torch.no_grad()
    def __call__(self, video: torch.Tensor, audio: torch.Tensor, timestep: int) -> Velocities:
        """Velocities of both branches.

        Args:
            video: (1, video channels, frames, rows, columns) float32 on the model's device.
            audio: (1, audio latents, audio channels) float32 there.
            timestep: From 0 to 1000.

        Raises:
            ValueError: If a latent has another shape or dtype.
        """
        config, layout = self.model.config, self.layout
        write_latents(layout, self._x, video, audio)
        rows = self.model.run(
            self._x, self.plan, time_columns(layout, timestep, self.time_channels)
        )
        videos, audios = unpack_tokens(layout, rows, config.video_channels, config.audio_channels)
        return Velocities(
            video_prompt=videos[:1],
            video_negative=videos[1:],
            audio_prompt=audios[:1],
            audio_negative=audios[1:],
        )


def _check_channels(model: Magi2Transformer, conditioning: Conditioning) -> None:
    config = model.config
    given = {"text": (conditioning.prompt.shape[1], config.text_channels)}
    if conditioning.images:
        given["image"] = (conditioning.images[0].latent.shape[0], config.video_channels)
    for name, (channels, expected) in given.items():
        if channels != expected:
            raise ValueError(
                f"the {name} has {channels} channels and the model takes {expected}: expected what "
                "an encoder made for this checkpoint gives."
            )
