"""Doubly stochastic stream weights."""

from __future__ import annotations

import torch


def sinkhorn_torch(
    logits: torch.Tensor, iterations: int, eps: float, *, exponentiate: bool = True
) -> torch.Tensor:
    """Exponentiate, then divide by column sums and row sums in turn.

    Args:
        logits: (..., n, n) float32.
        iterations: Pairs of a column step and a row step; the row step is last.
        eps: Added to each sum.
        exponentiate: False where logits are weights already.

    Returns:
        (..., n, n) float32, rows summing to 1 and columns nearly so. The maximum that keeps the
        exponential in range is taken over the whole matrix.

    On a CPU the iterations have the same bits eagerly and compiled, for one length or for all:
    sums are left folds. The exponential does not: Inductor's differs from eager torch's.
    """
    weights = logits
    if exponentiate:
        weights = torch.exp(logits - logits.amax(dim=(-2, -1), keepdim=True))
    for _ in range(iterations):
        weights = weights / (weights.sum(dim=-2, keepdim=True) + eps)
        weights = weights / (weights.sum(dim=-1, keepdim=True) + eps)
    return weights
