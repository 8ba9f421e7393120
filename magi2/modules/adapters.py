"""From packed latents and text features to residual streams, and from streams to velocities."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from magi2.config import Magi2Config
from magi2.modules.embeddings import FourierEmbedding
from magi2.modules.linear import GroupedLinear, GroupedNorm
from magi2.modules.modality import ModalityOrder


class PreAdapter(nn.Module):
    """A biased linear map for each modality, and the rotary frequencies; all float32.

    Args:
        config: The model's.
        device: Of the weights.
    """

    def __init__(self, config: Magi2Config, device: torch.device | str | None) -> None:
        super().__init__()
        width, dtype = config.stream_width, torch.float32
        self.video_embedder = nn.Linear(config.video_channels, width, device=device, dtype=dtype)
        self.audio_embedder = nn.Linear(config.audio_channels, width, device=device, dtype=dtype)
        self.text_embedder = nn.Linear(config.text_channels, width, device=device, dtype=dtype)
        self.rope = FourierEmbedding(config.num_rotary_bands, device)

    def forward(self, x: torch.Tensor, order: ModalityOrder) -> torch.Tensor:
        """Embed every token from the leading channels of its modality.

        Args:
            x: (tokens, channels) float32, in packed order.
            order: Of these tokens.

        Returns:
            (tokens, stream_width) float32, in packed order.
        """
        embedders = (self.video_embedder, self.audio_embedder, self.text_embedder)
        groups = zip(order.split(order.group(x)), embedders, strict=True)
        return order.ungroup(
            torch.cat([embed(x_g[:, : embed.in_features]) for x_g, embed in groups])
        )


class PostAdapter(nn.Module):
    """A norm and a linear map each for video and audio tokens; all float32.

    Args:
        config: The model's.
        device: Of the weights.
    """

    def __init__(self, config: Magi2Config, device: torch.device | str | None) -> None:
        super().__init__()
        width, dtype = config.stream_width, torch.float32
        self.output_channels = config.output_channels
        self.final_norm_video = GroupedNorm(width, 1, device)
        self.final_norm_audio = GroupedNorm(width, 1, device)
        self.final_linear_video = GroupedLinear(width, config.video_channels, 1, dtype, device)
        self.final_linear_audio = GroupedLinear(width, config.audio_channels, 1, dtype, device)

    def forward(self, x: torch.Tensor, order: ModalityOrder) -> torch.Tensor:
        """Velocities of video and audio tokens.

        Args:
            x: (tokens, stream_width), in packed order.
            order: Of these tokens.

        Returns:
            (tokens, output_channels) float32, in packed order; each row zero-filled on the right,
            rows of text tokens all zero.
        """
        video, audio, text = (rows.float() for rows in order.split(order.group(x)))
        sizes: tuple[int, ...] = ()
        video = self.final_linear_video(self.final_norm_video(video, sizes), sizes)
        audio = self.final_linear_audio(self.final_norm_audio(audio, sizes), sizes)
        rows = [video, audio, text[:, :0]]
        columns = self.output_channels
        return order.ungroup(torch.cat([F.pad(r, (0, columns - r.shape[1])) for r in rows]))
