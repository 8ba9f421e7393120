"""swiglu7: a gated activation whose inputs are clamped at 7."""

from __future__ import annotations

import torch

ALPHA = 1.702
LIMIT = 7.0


def swiglu7_torch(x: torch.Tensor) -> torch.Tensor:
    """Activate (..., 2 * dim) with gate and linear columns interleaved; (..., dim), x's dtype."""
    return gated_swiglu7_torch(x[..., 0::2], x[..., 1::2]).to(x.dtype)


def gated_swiglu7_torch(gate: torch.Tensor, linear: torch.Tensor) -> torch.Tensor:
    """`gate * sigmoid(1.702 * gate) * (linear + 1)` after the clamps, float32.

    The gate is clamped from above only, the linear branch from both sides. Every dtype holds the
    limit, so clamping the narrow values gives the same bits and a smaller copy.
    """
    gate = gate.clamp(max=LIMIT).float()
    linear = linear.clamp(-LIMIT, LIMIT).float()
    return gate * torch.sigmoid(ALPHA * gate) * (linear + 1)
