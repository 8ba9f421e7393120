"""The attention branch: norm, projections, rotary, packed attention, gates, output.

Everything but the attention itself works on this rank's tokens. Around it the ranks of the
sequence group trade tokens for heads, and back.

Letters: T this rank's tokens, N all tokens, H query heads, G key/value heads (both of the whole
model, h and g on this rank), W ranks, D channels of a head, C hidden size.
"""

from __future__ import annotations

import torch
from torch import nn

from magi2.config import Magi2Config
from magi2.modules.linear import NORM_EPS, GroupedLinear, GroupedNorm
from magi2.modules.request import RequestPlan
from magi2.ops.attention_backends import attend_with_sinks, choose_attention
from magi2.ops.attention_heads import rotated_heads_torch, store_heads_at_triton
from magi2.ops.head_backend import choose_heads, gate_heads, store_heads
from magi2.options import Options, head_shards_by_default
from magi2.topology import Topology, usable_group_sizes
from ulysses_comm import HeadScatterTarget, pack_head_shards, pin_head_layout


class Attention(nn.Module):
    """Attention inside packed sequences with learned sinks and per-head gates.

    Args:
        config: The model's.
        options: Which layouts the exchanges use.
        topology: The ranks that share the sequence.
        num_modalities: Weight sets of this layer: 3 or 1.
        device: Of the weights.

    Raises:
        ValueError: If the ranks do not divide the heads.
    """

    def __init__(
        self,
        config: Magi2Config,
        options: Options,
        topology: Topology,
        num_modalities: int,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.rank, self.world_size = topology.sequence_rank, topology.sequence_size
        if config.num_heads % self.world_size or config.num_kv_heads % self.world_size:
            raise ValueError(
                f"{config.num_heads} query and {config.num_kv_heads} key/value heads do not split "
                f"over {self.world_size} ranks: expected a sequence group whose size divides both, "
                f"one of {usable_group_sizes(config.num_heads, config.num_kv_heads)}."
            )
        by_default = head_shards_by_default(device)
        self.qkv_head_shards, self.output_head_shards = (
            self.world_size > 1 and (by_default if asked is None else asked)
            for asked in (options.qkv_head_shards, options.output_head_shards)
        )
        self.qkv_to_peers = options.qkv_to_peers
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.head_dim = config.head_dim
        self.softcap = config.attention_softcap
        self.attention_backend, self.qkv_backend = options.attention_backend, options.qkv_backend
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
        qkv, gate_TH = self.project(u_TC, plan)
        q_NhD, k_NgD, v_NgD = plan.sequence.scatter_heads(qkv)
        out_NhD = self.attend(q_NhD, k_NgD, v_NgD, plan)
        if self.output_head_shards:
            return self.output(plan.sequence.gather_head_shards(out_NhD), gate_TH, plan)
        return self.output(plan.sequence.gather_heads(out_NhD), gate_TH, plan)

    def project(
        self, u_TC: torch.Tensor, plan: RequestPlan
    ) -> tuple[list[torch.Tensor] | HeadScatterTarget, torch.Tensor]:
        """Queries, keys and values of this rank's tokens, ready to be sent, and gate logits.

        The norms of q and k and their rotation are float32: one rounding, at the end.

        Args:
            u_TC: In modality order.
            plan: Of the request.

        Returns:
            Rotated q and k, and v, in packed order and the activation dtype, each (T, heads, D) or
            the head shards (T, W, heads / W, D) of one send buffer, or stored with the ranks that
            they are for, which ends with the next exchange; and (T, H), in modality order.
        """
        sizes = plan.order.group_sizes
        x = self.pre_norm(u_TC, sizes)
        gate_TH = self.linear_g(x, sizes)
        qkv_TF = self.linear_qkv(x, sizes)
        q_weight, k_weight = (
            norm.weight.unflatten(0, (-1, self.head_dim)) for norm in (self.q_norm, self.k_norm)
        )
        arguments = (qkv_TF, q_weight, k_weight, sizes, plan.order.inverse, plan.rotary)
        heads = self.num_heads, self.num_kv_heads
        if choose_heads(self.qkv_backend, "store", qkv_TF, [q_weight, k_weight]).name == "triton":
            target = self._open_peers(qkv_TF, plan)
            if target is not None:
                store_heads_at_triton(*arguments, *heads, NORM_EPS, target.addresses)
                return target, gate_TH
            # Stored in the send buffer to begin with, whichever layout was asked for.
            return store_heads(*arguments, *heads, NORM_EPS, self.world_size), gate_TH
        qkv_heads = rotated_heads_torch(*arguments, *heads, NORM_EPS)
        if self.qkv_head_shards:
            qkv_heads = pack_head_shards(qkv_heads, self.world_size)
        return qkv_heads, gate_TH

    def _open_peers(self, qkv_TF: torch.Tensor, plan: RequestPlan) -> HeadScatterTarget | None:
        """The other ranks' memory, where it can be stored to; a compiler knows no addresses."""
        if not self.qkv_to_peers or torch.compiler.is_compiling():
            return None
        counts = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        return plan.sequence.open_heads(counts, self.head_dim, qkv_TF)

    def attend(
        self, q_NhD: torch.Tensor, k_NgD: torch.Tensor, v_NgD: torch.Tensor, plan: RequestPlan
    ) -> torch.Tensor:
        """Attention of this rank's heads, with their sinks, over whole sequences."""
        sinks = plan.sink_totals.of(self, self.sinks, self.rank, self.world_size)
        return attend_with_sinks(
            q_NhD,
            k_NgD,
            v_NgD,
            plan.packed,
            sinks,
            self.softcap,
            self.attention_backend,
            self.qkv_backend,
        )

    def explain(self, q_NhD: torch.Tensor, k_NgD: torch.Tensor, v_NgD: torch.Tensor) -> str:
        """Which implementation would attend to these now, and why.

        Raises:
            RuntimeError: If one was asked for by name and cannot run.
        """
        chosen = choose_attention(self.attention_backend, q_NhD, k_NgD, v_NgD, self.softcap)
        return f"{chosen.name}: {chosen.reason}"

    def output(self, out: torch.Tensor, gate_TH: torch.Tensor, plan: RequestPlan) -> torch.Tensor:
        """Gate each head and project.

        Args:
            out: Attention of this rank's tokens in packed order, (T, H, D), or the head shards
                (T, W, H / W, D) as they were received.
            gate_TH: Gate logits in modality order.
            plan: Of the request.

        Returns:
            (T, C) in modality order.
        """
        pin_head_layout(out, self.num_heads, self.head_dim, self.world_size)
        gated = gate_heads(out, plan.order.permutation, gate_TH, self.qkv_backend)
        projected: torch.Tensor = self.linear_proj(gated, plan.order.group_sizes)
        return projected
