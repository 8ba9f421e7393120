"""Routes into expert order, and their results back to tokens.

A route is one choice of one token in one head. Letters: T tokens, H heads, K choices, E experts of
a head, D channels of a head.
"""

from __future__ import annotations

import torch

SUM_ORDERS = ("choice", "expert")


def expert_order(choice_HTK: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, list[int]]:
    """Sort the routes by expert, keeping token order inside an expert.

    Args:
        choice_HTK: (heads, tokens, top_k) expert numbers within the head.
        num_experts: Experts of a head.

    Returns:
        Route numbers in expert order, (routes,) int64, and the routes of each of the
        heads * num_experts experts. Route (t, h, k) has the number `(t * heads + h) * top_k + k`:
        the rows are read and written as tokens store them.
    """
    heads = choice_HTK.shape[0]
    first_expert = torch.arange(heads, device=choice_HTK.device)[:, None, None] * num_experts
    expert = (choice_HTK + first_expert).permute(1, 0, 2).flatten()
    counts = torch.bincount(expert, minlength=heads * num_experts).tolist()
    return torch.argsort(expert, stable=True), counts


def inverse_permutation(order: torch.Tensor) -> torch.Tensor:
    """Where each element went: `x[order][inverse_permutation(order)]` is x."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return inverse


def sum_routes_torch(
    routes_THKD: torch.Tensor, choice_HTK: torch.Tensor, order: str
) -> torch.Tensor:
    """Add the weighted results of a token's choices in each head: (tokens, heads, channels).

    Args:
        routes_THKD: Weighted expert outputs, rounded to the activation dtype.
        choice_HTK: The experts they came from.
        order: "choice" adds in float32 from the best choice on and rounds once; "expert" starts
            from zero and adds in ascending expert number, rounding to the activation dtype after
            every addition, which is the reference's deterministic mode bit for bit.
    """
    if order == "choice":
        return _fold(routes_THKD, torch.float32).to(routes_THKD.dtype)
    if order == "expert":
        by_expert = choice_HTK.argsort(dim=-1).permute(1, 0, 2).unsqueeze(-1)
        sorted_THKD = routes_THKD.gather(2, by_expert.expand_as(routes_THKD))
        return _fold(sorted_THKD, routes_THKD.dtype)
    raise ValueError(f"order={order!r}: expected one of {SUM_ORDERS}.")


def _fold(routes_THKD: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    total = torch.zeros_like(routes_THKD[:, :, 0], dtype=dtype)
    for k in range(routes_THKD.shape[2]):
        total = total + routes_THKD[:, :, k]
    return total
