"""Which experts a token uses in each head, and with what weight.

Letters: T tokens, H heads of the mixture, D channels of such a head, E experts of a head,
K choices.
"""

from __future__ import annotations

import torch


def router_logits_torch(x_THD: torch.Tensor, gate_HED: torch.Tensor) -> torch.Tensor:
    """Each head's slice against that head's router rows, in float32: (heads, tokens, experts)."""
    # Widened and laid out head-major in one copy: the batched product then reads dense operands.
    x_HTD = x_THD.transpose(0, 1).to(torch.float32, memory_format=torch.contiguous_format)
    return torch.bmm(x_HTD.contiguous(), gate_HED.transpose(1, 2))


def choose_experts_torch(
    logits_HTE: torch.Tensor,
    bias_HE: torch.Tensor,
    *,
    top_k: int,
    score_func: str,
    route_norm: bool,
    route_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose by score plus bias, weigh by the score alone.

    Args:
        logits_HTE: (heads, tokens, experts) float32.
        bias_HE: (heads, experts) float32; changes the choice and never the weights.
        top_k: Experts chosen by each token in each head.
        score_func: "sigmoid" or "softmax" over the experts.
        route_norm: Whether the chosen scores are divided by their sum.
        route_scale: Factor on the weights.

    Returns:
        Chosen experts, int64 from 0 to experts - 1 within the head, in descending order of the
        biased score, and their weights, float32; both (heads, tokens, top_k). Exact ties fall as
        `torch.topk` lets them.
    """
    if score_func == "sigmoid":
        scores = torch.sigmoid(logits_HTE)
    else:
        scores = torch.softmax(logits_HTE, dim=-1)
    choice = (scores + bias_HE.unsqueeze(1)).topk(top_k, dim=-1, sorted=True).indices
    weights = scores.gather(-1, choice)
    if route_norm:
        weights = weights / weights.abs().sum(dim=-1, keepdim=True).clamp(min=1e-12)
    return choice, weights * route_scale
