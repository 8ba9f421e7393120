"""Linear layers and norms with one weight per modality."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from magi2.ops.grouped_norm import grouped_norm_torch

NORM_EPS = 1e-6


class GroupedLinear(nn.Module):
    """A matrix for each modality, without a bias.

    Args:
        in_features: Columns of the input.
        out_features: Columns of the output.
        num_groups: Weight sets, stacked along the weight's rows: 3, or 1 for all tokens.
        dtype: Of the weight.
        device: Of the weight.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_groups: int,
        dtype: torch.dtype,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.num_groups = num_groups
        self.weight = nn.Parameter(
            torch.empty(num_groups * out_features, in_features, dtype=dtype, device=device)
        )

    def forward(self, x: torch.Tensor, group_sizes: Sequence[int]) -> torch.Tensor:
        """Multiply rows in modality order, (rows, in_features), by their group's matrix."""
        if self.num_groups == 1:
            return F.linear(x, self.weight)
        pairs = zip(x.split(list(group_sizes)), self.weight.chunk(self.num_groups), strict=True)
        return torch.cat([F.linear(rows, weight) for rows, weight in pairs])


class GroupedNorm(nn.Module):
    """RMSNorm with a weight vector for each modality, stored as an offset from 1.

    Args:
        dim: Columns that are normalised.
        num_groups: Weight sets: 3, or 1 for all tokens.
        device: Of the weight, which is float32.
        out_dtype: Of the result; None for the input's.
    """

    def __init__(
        self,
        dim: int,
        num_groups: int,
        device: torch.device | str | None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_groups = num_groups
        self.out_dtype = out_dtype
        self.weight = nn.Parameter(
            torch.empty(num_groups * dim, dtype=torch.float32, device=device)
        )

    def forward(self, x: torch.Tensor, group_sizes: Sequence[int]) -> torch.Tensor:
        """Normalise rows in modality order, (rows, ..., dim)."""
        weight = self.weight.view(self.num_groups, -1)
        return grouped_norm_torch(x, weight, group_sizes, NORM_EPS, self.out_dtype)
