"""The routed experts: a gated MLP for every chosen (token, head, expert).

Letters: T tokens, H heads, K choices, E experts of all heads together, D channels of a head,
F channels inside an expert.
"""

from __future__ import annotations

import torch

from magi2.ops.swiglu import gated_swiglu7_torch
from magi2.ops.token_permute import expert_order, inverse_permutation


def expert_mlp_torch(
    x_THD: torch.Tensor,
    choice_HTK: torch.Tensor,
    weights_HTK: torch.Tensor,
    w_gate_EDF: torch.Tensor,
    w_up_EDF: torch.Tensor,
    w_down_EFD: torch.Tensor,
) -> torch.Tensor:
    """Run every route through its expert and weigh the result; the routes are not yet summed.

    Args:
        x_THD: (tokens, heads, head_dim) activations.
        choice_HTK: (heads, tokens, top_k) expert numbers within the head.
        weights_HTK: (heads, tokens, top_k) float32.
        w_gate_EDF: (heads * experts, head_dim, inner), head-major, input-major.
        w_up_EDF: As w_gate.
        w_down_EFD: (heads * experts, inner, head_dim).

    Returns:
        (tokens, heads, top_k, head_dim) in x's dtype. Products are accumulated in float32 and
        rounded twice: the activated inner row, and the weighted output row.
    """
    num_tokens, heads, head_dim = x_THD.shape
    top_k = choice_HTK.shape[-1]
    order, counts = expert_order(choice_HTK, w_gate_EDF.shape[0] // max(heads, 1))
    # Unbound once: indexing the banks expert by expert would give each its own full-size gradient.
    banks = [bank.unbind(0) for bank in (w_gate_EDF, w_up_EDF, w_down_EFD)]
    rows = x_THD.flatten(0, 1)[order // top_k].split(counts)
    weights = weights_HTK.permute(1, 0, 2).flatten()[order].split(counts)
    results = [x_THD.new_empty(0, head_dim)]
    for x, weight, gate, up, down in zip(rows, weights, *banks, strict=True):
        if x.shape[0]:
            results.append(_one_expert(x, weight, gate, up, down))
    routes = torch.cat(results)[inverse_permutation(order)]
    return routes.view(num_tokens, heads, top_k, head_dim)


def _one_expert(
    x: torch.Tensor,
    weight: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    wide = x.float()
    hidden = gated_swiglu7_torch(wide @ gate.float(), wide @ up.float()).to(x.dtype)
    return (hidden.float() @ down.float() * weight.unsqueeze(-1)).to(x.dtype)
