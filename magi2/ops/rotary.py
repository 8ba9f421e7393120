"""Rotary position encoding from Fourier angles of nine-column coordinates."""

from __future__ import annotations

import torch

TEMPERATURE = 10000.0


def rotary_bands(num_bands: int, device: torch.device | str | None = None) -> torch.Tensor:
    """Frequencies `10000 ** (-i / num_bands)`, (num_bands,) float32."""
    exponent = torch.arange(num_bands, dtype=torch.float32, device=device) / num_bands
    return TEMPERATURE**-exponent


def axis_scales(coords: torch.Tensor) -> torch.Tensor:
    """Steps between neighbours of a grid that stretches to its reference: (tokens, 3).

    `(reference - 1) / (size - 1)`, and 1 where both are 1. Not finite where only the size is 1,
    which no valid grid has.
    """
    size, reference = coords[:, 3:6], coords[:, 6:9]
    single = (size == 1) & (reference == 1)
    return torch.where(single, 1.0, (reference - 1) / (size - 1))


def rotary_table(coords: torch.Tensor, bands: torch.Tensor) -> torch.Tensor:
    """Sines, then cosines, of every token's angles.

    Args:
        coords: (tokens, 9) float32: position, grid size and reference size, each as t, h, w.
        bands: (num_bands,) float32.

    Returns:
        (tokens, 6 * num_bands) float32; each half ordered t bands, h bands, w bands.
    """
    position, size = coords[:, 0:3], coords[:, 3:6]
    # Space is measured from the middle of the grid, time from its start.
    centre = (size - 1) / 2 * torch.tensor([0.0, 1.0, 1.0], device=coords.device)
    angle = ((position - centre) * axis_scales(coords)).unsqueeze(-1) * bands
    angle = angle.flatten(1)
    return torch.cat([angle.sin(), angle.cos()], dim=1)


def apply_rotary_torch(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate the leading channels of every head, pairing channel j with j + half.

    Args:
        x: (tokens, heads, head_dim) float32.
        table: (tokens, 2 * half) float32 from `rotary_table`; 2 * half is at most head_dim.

    Returns:
        x's shape; the channels from 2 * half on are unchanged.
    """
    half = table.shape[1] // 2
    sin, cos = table.unsqueeze(1).split(half, dim=-1)
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
