"""The Triton mixture as operators that a compiler takes whole: no graph break, no look inside."""

from __future__ import annotations

import torch

from magi2.ops.fused_experts import run_experts_triton
from magi2.ops.fused_router import route_tokens_triton


@torch.library.custom_op("magi2::route_tokens", mutates_args=())
def route_tokens(
    x_THD: torch.Tensor,
    gate_HED: torch.Tensor,
    bias_HE: torch.Tensor,
    top_k: int,
    score_func: str,
    route_norm: bool,
    route_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`route_tokens_triton`."""
    return route_tokens_triton(
        x_THD,
        gate_HED,
        bias_HE,
        top_k=top_k,
        score_func=score_func,
        route_norm=route_norm,
        route_scale=route_scale,
    )


@route_tokens.register_fake
def _(
    x_THD: torch.Tensor,
    gate_HED: torch.Tensor,
    bias_HE: torch.Tensor,
    top_k: int,
    score_func: str,
    route_norm: bool,
    route_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, _ = x_THD.shape
    choice = x_THD.new_empty(tokens, heads, top_k, dtype=torch.int32)
    weights = x_THD.new_empty(tokens, heads, top_k, dtype=torch.float32)
    return choice.permute(1, 0, 2), weights.permute(1, 0, 2)


@torch.library.custom_op("magi2::run_experts", mutates_args=())
def run_experts(
    x_THD: torch.Tensor,
    choice_HTK: torch.Tensor,
    weights_HTK: torch.Tensor,
    w_gate_EDF: torch.Tensor,
    w_up_EDF: torch.Tensor,
    w_down_EFD: torch.Tensor,
    route_sum: str,
) -> torch.Tensor:
    """`run_experts_triton`."""
    return run_experts_triton(
        x_THD, choice_HTK, weights_HTK, w_gate_EDF, w_up_EDF, w_down_EFD, route_sum=route_sum
    )


@run_experts.register_fake
def _(
    x_THD: torch.Tensor,
    choice_HTK: torch.Tensor,
    weights_HTK: torch.Tensor,
    w_gate_EDF: torch.Tensor,
    w_up_EDF: torch.Tensor,
    w_down_EFD: torch.Tensor,
    route_sum: str,
) -> torch.Tensor:
    return x_THD.new_empty(x_THD.shape)
