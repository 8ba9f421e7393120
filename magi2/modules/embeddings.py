"""Position and time embeddings."""

from __future__ import annotations

import math

import torch
from torch import nn

from magi2.checks import describe
from magi2.ops.rotary import axis_scales, rotary_bands, rotary_table

NUM_COORDINATES = 9


class FourierEmbedding(nn.Module):
    """Rotary table of a packed input from its coordinates.

    Args:
        num_bands: Frequencies of each axis.
        device: Of the frequencies, a buffer that the checkpoint holds too.
    """

    bands: torch.Tensor

    def __init__(self, num_bands: int, device: torch.device | str | None) -> None:
        super().__init__()
        self.register_buffer("bands", rotary_bands(num_bands, device))

    def forward(self, coords: torch.Tensor) -> torch.Tensor:
        """(tokens, 9) float32 to (tokens, 6 * num_bands) float32."""
        return rotary_table(coords, self.bands)


def check_coords(coords: torch.Tensor) -> None:
    """Refuse coordinates from which no angle follows.

    Raises:
        ValueError: If they are not (tokens, 9) float32, or a grid of one element has a reference
            of another size, or a value is not finite.
    """
    is_matrix = isinstance(coords, torch.Tensor) and coords.dim() == 2
    if not is_matrix or coords.shape[1] != NUM_COORDINATES or coords.dtype != torch.float32:
        raise ValueError(
            f"coords is {describe(coords)}: expected (tokens, 9) float32 with "
            "columns t, h, w, T, H, W, refT, refH, refW."
        )
    wrong = ~(coords.isfinite().all(dim=1) & axis_scales(coords).isfinite().all(dim=1))
    if bool(wrong.any()):
        token = int(wrong.nonzero()[0])
        raise ValueError(
            f"coords of token {token} are {coords[token].tolist()}: expected finite numbers, and "
            "a reference size of 1 wherever the grid size is 1."
        )


def time_embedding(time: torch.Tensor, dim: int) -> torch.Tensor:
    """Sinusoids of the diffusion time, cosines first.

    Args:
        time: (n,) float32 from 0 to 1.
        dim: Columns of the result; even.

    Returns:
        (n, dim) float32.
    """
    half = dim // 2
    frequencies = torch.exp(
        -math.log(10000.0) * torch.arange(half, dtype=torch.float32, device=time.device) / half
    )
    # The factor 1000 does not always cancel the division that made `time`: keep both.
    angle = (1000.0 * time.float())[:, None] * frequencies
    return torch.cat([angle.cos(), angle.sin()], dim=1)
