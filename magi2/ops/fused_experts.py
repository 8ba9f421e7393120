"""The routed experts as grouped products in Triton, and the sum over a token's choices.

Same arguments and results as `expert_mlp_torch` and `sum_routes_torch`, whose letters apply: T
tokens, H heads, K choices, E experts of all heads together, D channels of a head, F channels inside
an expert. Nothing here waits for the device. No gradients: `magi2.ops.backend` keeps calls that
record them away.
"""

from __future__ import annotations

import torch

from magi2.ops.expert_launches import best_tiles, run_blocks
from magi2.ops.expert_tiles import ExpertTiles
from magi2.ops.launch import interprets, on_device
from magi2.ops.route_build import build_routes_triton
from magi2.ops.token_permute import SUM_ORDERS

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def run_experts_triton(
    x_THD: torch.Tensor,
    choice_HTK: torch.Tensor,
    weights_HTK: torch.Tensor,
    w_gate_EDF: torch.Tensor,
    w_up_EDF: torch.Tensor,
    w_down_EFD: torch.Tensor,
    *,
    route_sum: str,
    tiles: ExpertTiles | None = None,
) -> torch.Tensor:
    """`expert_mlp_triton` and `sum_routes_triton`: (tokens, heads, head_dim), x's dtype."""
    banks = (w_gate_EDF, w_up_EDF, w_down_EFD)
    routes_THKD = expert_mlp_triton(x_THD, choice_HTK, weights_HTK, *banks, tiles=tiles)
    return sum_routes_triton(routes_THKD, choice_HTK, route_sum)


def expert_mlp_triton(
    x_THD: torch.Tensor,
    choice_HTK: torch.Tensor,
    weights_HTK: torch.Tensor,
    w_gate_EDF: torch.Tensor,
    w_up_EDF: torch.Tensor,
    w_down_EFD: torch.Tensor,
    *,
    tiles: ExpertTiles | None = None,
) -> torch.Tensor:
    """Same result as `expert_mlp_torch`, within the order of its float32 sums.

    Args:
        x_THD: (tokens, heads, head_dim) bfloat16, float16 or float32, channels adjacent.
        choice_HTK: (heads, tokens, top_k) expert numbers within the head.
        weights_HTK: (heads, tokens, top_k) float32.
        w_gate_EDF: (heads * experts, head_dim, inner), head-major, input-major, contiguous.
        w_up_EDF: As w_gate.
        w_down_EFD: (heads * experts, inner, head_dim).
        tiles: How to cut the work; the table's choice for this device by default.

    Returns:
        (tokens, heads, top_k, head_dim) in x's dtype.

    Raises:
        ValueError: If shapes, dtypes, devices or layouts do not fit each other.
    """
    check_experts(x_THD, choice_HTK, weights_HTK, w_gate_EDF, w_up_EDF, w_down_EFD)
    heads, tokens, top_k = choice_HTK.shape
    num_experts = w_gate_EDF.shape[0]
    routes_THKD = x_THD.new_empty(tokens, heads, top_k, x_THD.shape[2])
    if routes_THKD.numel() == 0:
        return routes_THKD
    if tiles is None:
        tiles = best_tiles(x_THD, w_gate_EDF.shape[2])
    routes = build_routes_triton(choice_HTK, num_experts, tiles.block_rows)
    weights = weights_HTK.permute(1, 0, 2).contiguous()
    run_blocks(routes_THKD, x_THD, weights, routes, w_gate_EDF, w_up_EDF, w_down_EFD, tiles)
    return routes_THKD


def sum_routes_triton(
    routes_THKD: torch.Tensor, choice_HTK: torch.Tensor, order: str
) -> torch.Tensor:
    """Same bits as `sum_routes_torch`, in one launch.

    Args:
        routes_THKD: Weighted expert outputs, contiguous.
        choice_HTK: The experts they came from; read only for the order "expert".
        order: "choice" or "expert".
    """
    from magi2.kernels.sum_routes import sum_routes_kernel

    if order not in SUM_ORDERS:
        raise ValueError(f"order={order!r}: expected one of {SUM_ORDERS}.")
    tokens, heads, top_k, dim = routes_THKD.shape
    out_THD = routes_THKD.new_empty(tokens, heads, dim)
    if out_THD.numel() == 0:
        return out_THD
    block_d = min(1 << (dim - 1).bit_length(), 256)
    block_r = max(1, 2048 // block_d)
    grid = (-(-tokens * heads // block_r), -(-dim // block_d))
    with on_device(routes_THKD):
        sum_routes_kernel[grid](
            routes_THKD.contiguous(),
            choice_HTK.contiguous() if order == "expert" else choice_HTK,
            out_THD,
            tokens * heads,
            tokens,
            HEADS=heads,
            TOP_K=top_k,
            D=dim,
            BLOCK_R=block_r,
            BLOCK_D=block_d,
            BY_EXPERT=order == "expert",
            INTERPRETED=interprets(routes_THKD),
        )
    return out_THD


def check_experts(
    x_THD: torch.Tensor,
    choice_HTK: torch.Tensor,
    weights_HTK: torch.Tensor,
    w_gate_EDF: torch.Tensor,
    w_up_EDF: torch.Tensor,
    w_down_EFD: torch.Tensor,
) -> None:
    """Refuse what the kernels would read wrongly.

    Raises:
        ValueError: Says what was given and what was expected.
    """
    if x_THD.dtype not in DTYPES:
        raise ValueError(f"x is {x_THD.dtype}: expected one of {DTYPES}.")
    if x_THD.ndim != 3 or choice_HTK.ndim != 3 or w_gate_EDF.ndim != 3:
        raise ValueError(
            f"x is {list(x_THD.shape)}, choice {list(choice_HTK.shape)}, w_gate "
            f"{list(w_gate_EDF.shape)}: expected (T, H, D), (H, T, K) and (E, D, F)."
        )
    tokens, heads, dim = x_THD.shape
    num_experts, _, inner = w_gate_EDF.shape
    expected = {
        "choice": (choice_HTK, (heads, tokens, choice_HTK.shape[2])),
        "weights": (weights_HTK, tuple(choice_HTK.shape)),
        "w_gate": (w_gate_EDF, (num_experts, dim, inner)),
        "w_up": (w_up_EDF, (num_experts, dim, inner)),
        "w_down": (w_down_EFD, (num_experts, inner, dim)),
    }
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} is {list(tensor.shape)}: expected {list(shape)}.")
        if tensor.device != x_THD.device:
            raise ValueError(f"{name} is on {tensor.device}, x on {x_THD.device}: expected one.")
        if name.startswith("w_") and not (tensor.is_contiguous() and tensor.dtype == x_THD.dtype):
            raise ValueError(
                f"{name} is {tensor.dtype} with strides {tensor.stride()}: expected contiguous "
                f"{x_THD.dtype}, as x is."
            )
    if heads and num_experts % heads:
        raise ValueError(f"{num_experts} experts for {heads} heads: expected a multiple.")
    if weights_HTK.dtype != torch.float32 or choice_HTK.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"weights are {weights_HTK.dtype} and choice is {choice_HTK.dtype}: expected float32 "
            "and int32 or int64."
        )
    if dim > 1 and x_THD.stride(2) != 1:
        raise ValueError(f"x has strides {x_THD.stride()}: expected adjacent channels.")
