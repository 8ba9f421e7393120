"""Router and routed experts of the heads that this rank holds."""

from __future__ import annotations

import torch
from torch import nn

from magi2.config import Magi2Config
from magi2.modules.router import Router
from magi2.ops.expert_mlp import expert_mlp_torch
from magi2.ops.token_permute import sum_routes_torch
from magi2.options import Options


class RoutedExperts(nn.Module):
    """For each head: choose experts, run them, add their weighted outputs.

    Row `head * num_experts + expert` of every weight belongs to that expert of that head. Expert
    matrices are input-major: `x @ W`.

    Args:
        config: The model's.
        options: Which router bias, and the order of the sum.
        num_heads: Heads that this rank holds.
        device: Of the weights.
    """

    W_gate: nn.Parameter
    W_up: nn.Parameter
    W_down: nn.Parameter

    def __init__(
        self,
        config: Magi2Config,
        options: Options,
        num_heads: int,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.route_sum = options.route_sum
        rows = num_heads * config.moe.num_experts
        dim, inner = config.moe_head_dim, config.moe.expert_intermediate_size
        self.router = Router(config.moe, num_heads, options.router_bias, device)
        self.gate = nn.Parameter(torch.empty(rows, dim, dtype=torch.float32, device=device))
        for name, shape in (
            ("W_gate", (rows, dim, inner)),
            ("W_up", (rows, dim, inner)),
            ("W_down", (rows, inner, dim)),
        ):
            weight = torch.empty(shape, dtype=config.dtype, device=device)
            self.register_parameter(name, nn.Parameter(weight))

    def forward(self, x_THD: torch.Tensor) -> torch.Tensor:
        """(tokens, heads, head_dim) to the same."""
        choice_HTK, weights_HTK = self.router(x_THD, self.gate)
        routes_THKD = expert_mlp_torch(
            x_THD, choice_HTK, weights_HTK, self.W_gate, self.W_up, self.W_down
        )
        return sum_routes_torch(routes_THKD, choice_HTK, self.route_sum)
