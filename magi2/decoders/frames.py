"""Decoded values to the bytes of frames."""

from __future__ import annotations

import torch


def to_bytes(pixels: torch.Tensor) -> torch.Tensor:
    """Values in [-1, 1] to [0, 255], truncated as the reference does, not rounded.

    Args:
        pixels: (3, frames, height, width), floating.

    Returns:
        (frames, height, width, 3) uint8 on the CPU.

    Raises:
        RuntimeError: If they hold NaN, which would be shown as black.
    """
    if bool(pixels.isnan().any()):
        raise RuntimeError(
            "the decoded frames hold NaN: expected numbers. The decoder's weights are damaged, or "
            "the latents are out of its reach; latents.safetensors has them."
        )
    # Widened first: bfloat16 holds no fractions next to 255, so it could not truncate.
    scaled = (pixels.float() * 0.5 + 0.5).clamp(0, 1) * 255
    return scaled.to(torch.uint8).permute(1, 2, 3, 0).contiguous().cpu()
