"""Packed requests for the tests: latents, coordinates, modality ids and sequence ends."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from magi2.config import Magi2Config
from magi2.modules.embeddings import time_embedding

TIME_COLUMNS = 16


@dataclass
class Packed:
    """The arguments of the transformer, in its order."""

    x: torch.Tensor
    coords: torch.Tensor
    modality: torch.Tensor
    cu_seqlens: torch.Tensor
    time_tokens: torch.Tensor

    def __iter__(self):
        return iter((self.x, self.coords, self.modality, self.cu_seqlens, self.time_tokens))

    def to(self, device: str) -> Packed:
        return Packed(*(tensor.to(device) for tensor in self))


def grid(shape, reference=None, offset=(0, 0, 0)) -> torch.Tensor:
    """Coordinates of a grid, time outermost."""
    axes = [torch.arange(n) + o for n, o in zip(shape, offset, strict=True)]
    position = torch.cartesian_prod(*axes)
    sizes = torch.tensor([*shape, *(reference or shape)]).expand(len(position), -1)
    return torch.cat([position, sizes], dim=1).float()


def sequence(video, audio: int, text: int, image=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Coordinates and modality ids of one sequence: video, audio, text, perhaps an image."""
    parts = [(0, grid(video)), (1, grid((audio, 1, 1), ((audio - 1) // 8 + 1, 1, 1)))]
    if text:
        parts.append((2, grid((text, 1, 1), (1, 1, 1), (-text, 0, 0))))
    if image:
        frame = video[0] + 2
        parts.append((2, torch.tensor([[frame, -1, -1, 1, *image, 1, *image]]).float()))
        parts.append((0, grid((1, *image), offset=(frame, 0, 0))))
    coords = torch.cat([part for _, part in parts])
    modality = torch.cat([torch.full((len(part),), kind) for kind, part in parts])
    return coords, modality


def packed_pair(config: Magi2Config, seed: int = 0, video=(2, 3, 4), audio: int = 5) -> Packed:
    """A conditional sequence with an image, an unconditional one with one text token, padding."""
    parts = [sequence(video, audio, 7, (1, 2)), sequence(video, audio, 1, (1, 2))]
    parts.append((grid((3, 1, 1)), torch.full((3,), 2)))
    coords, modality = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    lengths = torch.tensor([0] + [len(part) for part, _ in parts])
    generator = torch.Generator().manual_seed(seed)
    x = torch.zeros(len(coords), config.input_channels)
    widths = (config.video_channels, config.audio_channels, config.text_channels)
    for kind, width in enumerate(widths):
        rows = modality == kind
        x[rows, :width] = torch.randn(int(rows.sum()), width, generator=generator)
    time = torch.where(modality == 2, 0.0, 0.7)
    return Packed(
        x=x,
        coords=coords,
        modality=modality.int(),
        cu_seqlens=lengths.cumsum(0).int(),
        time_tokens=time_embedding(time, TIME_COLUMNS),
    )


def without_padding(packed: Packed) -> Packed:
    """All but the last sequence, which is padding."""
    end = int(packed.cu_seqlens[-2])
    rows = (packed.x, packed.coords, packed.modality)
    return Packed(*(t[:end] for t in rows), packed.cu_seqlens[:-1], packed.time_tokens[:end])
