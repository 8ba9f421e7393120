"""Positions of packed tokens: each kind of token is a grid with a place in time and space.

A row of coordinates is t, h, w, T, H, W, refT, refH, refW: a position, the size of its grid, and
the size that the grid is stretched to.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from magi2.geometry import Geometry

# Audio latents in the time of one video latent, less the first: both clocks run 25 ticks a second,
# and a video latent takes 8 of them.
_AUDIO_PER_FRAME = 8
# Latent frames between the end of the clip and the first reference image.
_IMAGE_GAP = 2


def grid_coords(
    shape: Sequence[int],
    reference: Sequence[int] | None = None,
    offset: Sequence[int] = (0, 0, 0),
) -> torch.Tensor:
    """Coordinates of a grid, time outermost and columns innermost.

    Args:
        shape: Sizes in time, rows and columns; zero is allowed.
        reference: Sizes that the grid is stretched to; None for its own.
        offset: Position of the first element.

    Returns:
        (elements, 9) float32, on the CPU.
    """
    axes = [torch.arange(n) + start for n, start in zip(shape, offset, strict=True)]
    positions = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(-1, 3)
    sizes = torch.tensor([*shape, *(reference or shape)]).expand(len(positions), -1)
    return torch.cat([positions, sizes], dim=1).float()


def video_coords(geometry: Geometry) -> torch.Tensor:
    """Video tokens of a clip: frame, row and column are positions as they are."""
    return grid_coords(geometry.video_shape(1)[2:])


def audio_coords(geometry: Geometry) -> torch.Tensor:
    """Audio tokens of a clip, stretched over the time of the video latents."""
    length = geometry.audio_length
    return grid_coords((length, 1, 1), ((length - 1) // _AUDIO_PER_FRAME + 1, 1, 1))


def text_coords(length: int) -> torch.Tensor:
    """Text tokens before the clip. The reference size of 1 puts all of several in one place."""
    return grid_coords((length, 1, 1), (1, 1, 1), (-length, 0, 0))


def image_coords(geometry: Geometry, index: int, height: int, width: int) -> torch.Tensor:
    """A reference image behind the clip: its special token, then its latents, row by row."""
    frame = geometry.latent_frames + _IMAGE_GAP + index
    # The special token stands diagonally off the first latent and says that it is of this grid.
    special = torch.tensor([[frame, -1, -1, 1, height, width, 1, height, width]]).float()
    return torch.cat([special, grid_coords((1, height, width), offset=(frame, 0, 0))])


def padding_coords(length: int) -> torch.Tensor:
    """Padding, a line of its own from zero."""
    return grid_coords((length, 1, 1))
