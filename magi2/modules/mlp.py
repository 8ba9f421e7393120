"""The dense MLP branch."""

from __future__ import annotations

import torch
from torch import nn

from magi2.config import Magi2Config
from magi2.modules.linear import GroupedLinear, GroupedNorm
from magi2.modules.request import RequestPlan
from magi2.ops.swiglu import swiglu7_torch


class DenseMlp(nn.Module):
    """Norm, one projection to gate and linear columns, activation, projection back.

    Args:
        config: The model's.
        num_modalities: Weight sets of this layer: 3 or 1.
        device: Of the weights.
    """

    def __init__(
        self, config: Magi2Config, num_modalities: int, device: torch.device | str | None
    ) -> None:
        super().__init__()
        hidden, inner, dtype = config.hidden_size, config.intermediate_size, config.dtype
        self.pre_norm = GroupedNorm(hidden, num_modalities, device)
        self.up_gate_proj = GroupedLinear(hidden, 2 * inner, num_modalities, dtype, device)
        self.down_proj = GroupedLinear(inner, hidden, num_modalities, dtype, device)

    def forward(self, u: torch.Tensor, plan: RequestPlan) -> torch.Tensor:
        """(tokens, hidden) in modality order to the same."""
        sizes = plan.order.group_sizes
        inner = swiglu7_torch(self.up_gate_proj(self.pre_norm(u, sizes), sizes))
        out: torch.Tensor = self.down_proj(inner, sizes)
        return out
