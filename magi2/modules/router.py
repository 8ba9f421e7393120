"""Expert choice of every token in every head of the mixture."""

from __future__ import annotations

import torch
from torch import nn

from magi2.config import MoeConfig
from magi2.ops.backend import route_tokens


class Router(nn.Module):
    """Chooses experts with one of two biases that training leaves behind.

    Both biases stay as loaded, so that saving writes them back; `bias` says which one chooses.
    The reference copies the averaged bias over the raw one at load instead: the same choices.

    Args:
        moe: The mixture's configuration.
        num_heads: Heads that this rank holds.
        bias: "ema" or "raw".
        device: Of the buffers.
        backend: What runs it, as in `Options.moe_backend`.
    """

    expert_bias: torch.Tensor
    expert_bias_ema: torch.Tensor

    def __init__(
        self,
        moe: MoeConfig,
        num_heads: int,
        bias: str,
        device: torch.device | str | None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        self.backend = backend
        self.moe = moe
        self.bias = bias
        for name in ("expert_bias", "expert_bias_ema"):
            size = num_heads * moe.num_experts
            self.register_buffer(name, torch.empty(size, dtype=torch.float32, device=device))

    def forward(self, x_THD: torch.Tensor, gate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts and weights, (heads, tokens, top_k) each, from the router rows `gate`.

        Args:
            x_THD: (tokens, heads, head_dim).
            gate: (heads * experts, head_dim) float32.
        """
        experts = self.moe.num_experts
        bias = self.expert_bias_ema if self.bias == "ema" else self.expert_bias
        return route_tokens(
            x_THD,
            gate.unflatten(0, (-1, experts)),
            bias.unflatten(0, (-1, experts)),
            self.backend,
            top_k=self.moe.top_k,
            score_func=self.moe.score_func,
            route_norm=self.moe.route_norm,
            route_scale=self.moe.route_scale,
        )
