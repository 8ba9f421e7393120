"""The attention branch: norm, projections, rotary, packed attention, gates, output.

Letters: T tokens, H query heads, G key/value heads, D channels of a head, C hidden size.
"""

from __future__ import annotations

import torch
from torch import nn

from magi2.config import Magi2Config
from magi2.modules.linear import GroupedLinear, GroupedNorm
from magi2.modules.request import RequestPlan
from magi2.ops.attention import apply_sinks_torch, packed_attention_torch
from magi2.ops.rotary import apply_rotary_torch


class Attention(nn.Module):
    """Attention inside packed sequences with learned sinks and per-head gates.

    Args:
        config: The model's.
        num_modalities: Weight sets of this layer: 3 or 1.
        device: Of the weights.
    """

    def __init__(
        self, config: Magi2Config, num_modalities: int, device: torch.device | str | None
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        self.softcap = config.attention_softcap
        self.dtype = config.dtype
        hidden, head_dim, groups = config.hidden_size, config.head_dim, num_modalities
        qkv_features = (self.num_heads + 2 * self.num_kv_heads) * head_dim
        self.pre_norm = GroupedNorm(hidden, groups, device)
        self.linear_g = GroupedLinear(hidden, self.num_heads, groups, self.dtype, device)
        self.linear_qkv = GroupedLinear(hidden, qkv_features, groups, self.dtype, device)
        self.linear_proj = GroupedLinear(
            self.num_heads * head_dim, hidden, groups, self.dtype, device
        )
        self.q_norm = GroupedNorm(head_dim, groups, device, torch.float32)
        self.k_norm = GroupedNorm(head_dim, groups, device, torch.float32)
        self.sinks = nn.Parameter(
            torch.empty(config.num_sinks, self.num_heads, dtype=torch.float32, device=device)
        )

    def forward(self, u_TC: torch.Tensor, plan: RequestPlan) -> torch.Tensor:
        """(tokens, hidden) in modality order to the same."""
        q_THD, k_TGD, v_TGD, gate_TH = self.project(u_TC, plan)
        out_THD = self.attend(q_THD, k_TGD, v_TGD, plan)
        return self.output(out_THD, gate_TH, plan)

    def project(
        self, u_TC: torch.Tensor, plan: RequestPlan
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated q and k, and v, in packed order and the activation dtype; gate logits as u.

        The norms of q and k and their rotation are float32: one rounding, at the end.
        """
        sizes = plan.order.group_sizes
        x = self.pre_norm(u_TC, sizes)
        gate_TH = self.linear_g(x, sizes)
        qkv = self.linear_qkv(x, sizes).unflatten(1, (-1, self.head_dim))
        q, k, v = qkv.split([self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1)
        ungroup, rotary = plan.order.ungroup, plan.rotary
        q = apply_rotary_torch(ungroup(self.q_norm(q, sizes)), rotary).to(self.dtype)
        k = apply_rotary_torch(ungroup(self.k_norm(k, sizes)), rotary).to(self.dtype)
        return q, k, ungroup(v), gate_TH

    def attend(
        self, q_THD: torch.Tensor, k_TGD: torch.Tensor, v_TGD: torch.Tensor, plan: RequestPlan
    ) -> torch.Tensor:
        """Attention with sinks over whole sequences, in packed order."""
        out, lse = packed_attention_torch(q_THD, k_TGD, v_TGD, plan.cu_seqlens, self.softcap)
        return apply_sinks_torch(out, lse, self.sinks)[0]

    def output(
        self, out_THD: torch.Tensor, gate_TH: torch.Tensor, plan: RequestPlan
    ) -> torch.Tensor:
        """Gate each head and project: (tokens, hidden) in modality order."""
        out_THD = plan.order.group(out_THD)
        gated = (out_THD * torch.sigmoid(gate_TH).unsqueeze(-1)).flatten(1)
        projected: torch.Tensor = self.linear_proj(gated, plan.order.group_sizes)
        return projected
