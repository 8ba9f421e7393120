"""Router and routed experts of the heads that this rank holds, and the way of tokens to them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from magi2.config import Magi2Config
from magi2.modules.replicas import ReplicaDispatcher
from magi2.modules.router import Router
from magi2.modules.sequence import SequenceDispatcher
from magi2.ops.backend import choose_backend, explain, run_experts
from magi2.ops.expert_launches import explain_tiles
from magi2.options import Options
from magi2.topology import heads_per_rank


class RoutedExperts(nn.Module):
    """For each head: choose experts, run them, add their weighted outputs.

    Row `head * num_experts + expert` of every weight belongs to that expert of that head. Expert
    matrices are input-major: `x @ W`.

    Args:
        config: The model's.
        options: Which router bias, the order of the sum, and what runs it.
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
        self.num_heads = num_heads
        self.route_sum = options.route_sum
        self.backend = options.moe_backend
        rows = num_heads * config.moe.num_experts
        dim, inner = config.moe_head_dim, config.moe.expert_intermediate_size
        self.router = Router(
            config.moe, num_heads, options.router_bias, device, options.moe_backend
        )
        self.gate = nn.Parameter(torch.empty(rows, dim, dtype=torch.float32, device=device))
        for name, shape in (
            ("W_gate", (rows, dim, inner)),
            ("W_up", (rows, dim, inner)),
            ("W_down", (rows, inner, dim)),
        ):
            weight = torch.empty(shape, dtype=config.dtype, device=device)
            self.register_parameter(name, nn.Parameter(weight))

    def forward(self, x_THD: torch.Tensor) -> torch.Tensor:
        """(tokens, heads, head_dim) to the same; without heads, the input."""
        if x_THD.shape[1] == 0:
            return x_THD
        choice_HTK, weights_HTK = self.router(x_THD, self.gate)
        banks = (self.W_gate, self.W_up, self.W_down)
        return run_experts(x_THD, choice_HTK, weights_HTK, banks, self.route_sum, self.backend)

    def explain(self, x_THD: torch.Tensor) -> str:
        """Which implementation would run the experts on this input now, and why.

        Of Triton also the form: "hopper", "fused" or "two products", and why not the first.

        Raises:
            RuntimeError: If "triton" was asked for and cannot run.
        """
        banks = (self.W_gate, self.W_up, self.W_down)
        experts = self.W_gate.shape[0] // max(self.num_heads, 1)
        choice = choose_backend(self.backend, x_THD, banks, experts)
        if choice.name == "torch":
            return explain(choice)
        return f"{explain(choice)}; {explain_tiles(x_THD, self.W_gate.shape[2])}"


def run_on_head_owners(
    x_THD: torch.Tensor,
    experts: RoutedExperts,
    dispatcher: SequenceDispatcher | ReplicaDispatcher,
) -> torch.Tensor:
    """Send each head's tokens to the rank that holds its experts, and bring the results back.

    Ranks hold equal runs of heads; where the heads do not divide, the last ranks' runs are filled
    up with heads of zeros, which travel, are not computed, and are dropped.

    Args:
        x_THD: This rank's tokens, all heads.
        experts: Of the heads that this rank holds; perhaps none, it then only takes part.
        dispatcher: Holds the tokens of each rank that takes part: no size is exchanged.

    Returns:
        x's shape.

    Two all-to-alls, none on a lone rank.
    """
    world_size, num_heads = dispatcher.world_size, x_THD.shape[1]
    if world_size == 1:
        lone: torch.Tensor = experts(x_THD)
        return lone
    run = heads_per_rank(num_heads, world_size)
    (mine,) = dispatcher.scatter_heads([_pad_heads(x_THD, run * world_size)])
    routed = _pad_heads(experts(mine[:, : experts.num_heads]), run)
    return dispatcher.gather_heads(routed)[:, :num_heads]


def _pad_heads(x_THD: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Append heads of zeros up to num_heads."""
    missing = num_heads - x_THD.shape[1]
    return F.pad(x_THD, (0, 0, 0, missing)) if missing else x_THD
