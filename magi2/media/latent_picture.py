"""Pictures of a video latent: its channels reduced to three colours."""

from __future__ import annotations

import torch

# Values beyond these quantiles are clipped, so that a few outliers do not grey out the rest.
_LOW, _HIGH = 0.01, 0.99
# The quantiles come from at most this many values; torch.quantile takes no more than 2**24.
_SAMPLE = 1 << 20


def latent_colours(latent: torch.Tensor) -> torch.Tensor:
    """Colours from the three principal components of the channels, over the whole clip.

    Each component fills the range of its colour; its sign is chosen so that the largest weight is
    positive, which makes equal latents give equal pictures.

    Args:
        latent: (channels, frames, rows, columns), floating, finite; at least one channel.

    Returns:
        (frames, rows, columns, 3) uint8 on the CPU.
    """
    channels = latent.shape[0]
    points = latent.detach().cpu().double().flatten(1)
    points = points - points.mean(dim=1, keepdim=True)
    _, vectors = torch.linalg.eigh(points @ points.T / points.shape[1])
    axes = vectors.flip(1)[:, :3].T
    largest = axes.gather(1, axes.abs().argmax(dim=1, keepdim=True))
    components = (axes * largest.sign()) @ points
    if channels < 3:
        # Fewer channels than colours: the missing ones stay at mid grey.
        components = torch.cat([components, components.new_zeros(3 - channels, points.shape[1])])
    stride = -(-components.shape[1] // _SAMPLE)
    limits = torch.quantile(
        components[:, ::stride], torch.tensor([_LOW, _HIGH], dtype=torch.float64), dim=1
    )
    low, high = limits[0, :, None], limits[1, :, None]
    scaled = torch.where(high > low, (components - low) / (high - low), 0.5).clamp(0, 1)
    return (scaled * 255).round().to(torch.uint8).T.reshape(*latent.shape[1:], 3)


def enlarge(frames: torch.Tensor, width: int) -> torch.Tensor:
    """Repeat pixels until a frame is at least `width` wide; every latent stays a square.

    Args:
        frames: (frames, rows, columns, 3) uint8.
        width: Pixels.

    Returns:
        (frames, rows * n, columns * n, 3) for the smallest even n that reaches the width, or a
        smaller one where the frame would be more than twice as high as that.
    """
    rows, columns = frames.shape[1:3]
    factor = max(2, min(-(-width // columns), 2 * width // rows))
    factor += factor % 2
    return frames.repeat_interleave(factor, dim=1).repeat_interleave(factor, dim=2)
