"""The multi-head mixture-of-experts branch."""

from __future__ import annotations

import torch
from torch import nn

from magi2.config import NUM_MODALITIES, Magi2Config
from magi2.modules.experts import RoutedExperts, run_on_head_owners
from magi2.modules.linear import GroupedLinear, GroupedNorm
from magi2.modules.request import RequestPlan
from magi2.ops.swiglu import swiglu7_torch
from magi2.options import Options
from magi2.topology import Topology


class MultiHeadMoe(nn.Module):
    """Routed experts, an expert that every token uses, and one for the token's modality.

    The norm and the modality's expert have three weight sets in every layer.

    Args:
        config: The model's.
        options: Passed to the routed experts.
        topology: The ranks that share the experts.
        device: Of the weights.
    """

    def __init__(
        self,
        config: Magi2Config,
        options: Options,
        topology: Topology,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        hidden, width, dtype = config.hidden_size, config.moe_hidden_size, config.dtype
        shared, own = config.moe.shared_intermediate_size, config.moe.modality_intermediate_size
        self.num_heads = config.moe.num_heads
        self.pre_norm = GroupedNorm(hidden, NUM_MODALITIES, device)
        self.split_linear = GroupedLinear(hidden, width, 1, dtype, device)
        local_heads = len(topology.local_heads(self.num_heads))
        self.moe_mlp = RoutedExperts(config, options, local_heads, device)
        self.merge_linear = GroupedLinear(width, hidden, 1, dtype, device)
        self.shared_expert_fc1 = GroupedLinear(hidden, 2 * shared, 1, dtype, device)
        self.shared_expert_fc2 = GroupedLinear(shared, hidden, 1, dtype, device)
        self.modality_specific_shared_expert_fc1 = GroupedLinear(
            hidden, 2 * own, NUM_MODALITIES, dtype, device
        )
        self.modality_specific_shared_expert_fc2 = GroupedLinear(
            own, hidden, NUM_MODALITIES, dtype, device
        )

    def forward(self, u: torch.Tensor, plan: RequestPlan) -> torch.Tensor:
        """(tokens, hidden) in modality order to the same."""
        x, common = self.project(u, plan)
        return self.output(self.route(x, plan), common, plan)

    def project(self, u: torch.Tensor, plan: RequestPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """What is sent to the routed experts, and what this rank's own experts add.

        Args:
            u: (tokens, hidden) in modality order.
            plan: Of the request.

        Returns:
            (tokens, moe_hidden), and the sum of the expert that every token uses and its
            modality's: (tokens, hidden).
        """
        sizes = plan.order.group_sizes
        x = self.pre_norm(u, sizes)
        split = self.split_linear(x, sizes)
        # Each first projection is activated on its own: its result stays dense for the second.
        shared_inner = swiglu7_torch(self.shared_expert_fc1(x, sizes))
        shared = self.shared_expert_fc2(shared_inner, sizes)
        own_inner = swiglu7_torch(self.modality_specific_shared_expert_fc1(x, sizes))
        own = self.modality_specific_shared_expert_fc2(own_inner, sizes)
        return split, shared + own

    def route(self, x: torch.Tensor, plan: RequestPlan) -> torch.Tensor:
        """The routed experts on the heads of (tokens, moe_hidden), as such a tensor."""
        heads = x.unflatten(1, (self.num_heads, -1))
        return run_on_head_owners(heads, self.moe_mlp, plan.experts).flatten(1)

    def output(self, routed: torch.Tensor, common: torch.Tensor, plan: RequestPlan) -> torch.Tensor:
        """Merge the routed heads and add what `project` kept: (tokens, hidden)."""
        merged: torch.Tensor = self.merge_linear(routed, plan.order.group_sizes)
        return merged + common
