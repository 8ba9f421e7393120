"""RMS normalisation with one weight vector per modality."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def grouped_norm_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    group_sizes: Sequence[int],
    eps: float,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Divide each row by its root mean square and scale it by 1 + its group's weight.

    Args:
        x: (rows, ..., dim), rows in group order; dimensions in between share the weight.
        weight: (num_groups, dim) float32, stored as an offset from 1.
        group_sizes: Rows of each group; not read when there is one group.
        eps: Added to the mean square.
        out_dtype: Of the result; None for x's.

    Returns:
        x's shape, computed in float32 and rounded once.
    """
    out_dtype = out_dtype or x.dtype
    if weight.shape[0] == 1:
        return _norm(x, weight[0], eps, out_dtype)
    groups = zip(x.split(list(group_sizes)), weight, strict=True)
    return torch.cat([_norm(rows, w, eps, out_dtype) for rows, w in groups])


def _norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out_dtype: torch.dtype
) -> torch.Tensor:
    x = x.float()
    scale = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps)
    return (x * scale * (1 + weight)).to(out_dtype)
