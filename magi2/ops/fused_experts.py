"""The routed experts as grouped products in Triton, and the sum over a token's choices.

Same arguments and results as `expert_mlp_torch` and `sum_routes_torch`, whose letters apply: T
tokens, H heads, K choices, E experts of all heads together, D channels of a head, F channels inside
an expert. Nothing here waits for the device. No gradients: `magi2.ops.backend` keeps calls that
record them away.
"""

from __future__ import annotations

from typing import Any

import torch

from magi2.ops.expert_tiles import ExpertTiles, FusedTile, ProductTile, choose_tiles
from magi2.ops.launch import interprets, multiprocessors, on_device
from magi2.ops.route_build import BlockRoutes, build_routes_triton
from magi2.ops.token_permute import SUM_ORDERS

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FUSED_DIM = 256  # widest head whose float32 row block fits the registers of one program


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
        mean = heads * tokens * top_k / num_experts
        tiles = choose_tiles(x_THD.device.type, x_THD.dtype, mean)
    routes = build_routes_triton(choice_HTK, num_experts, tiles.block_rows)
    weights = weights_HTK.permute(1, 0, 2).contiguous()
    run_blocks(routes_THKD, x_THD, weights, routes, w_gate_EDF, w_up_EDF, w_down_EFD, tiles)
    return routes_THKD


def run_blocks(
    out_THKD: torch.Tensor,
    x_THD: torch.Tensor,
    weights_THK: torch.Tensor,
    routes: BlockRoutes,
    w_gate_EDF: torch.Tensor,
    w_up_EDF: torch.Tensor,
    w_down_EFD: torch.Tensor,
    tiles: ExpertTiles,
) -> None:
    """The products alone, for routes that are laid out already; writes every row of `out_THKD`.

    Raises:
        ValueError: If the blocks have other rows than the tiles, or the fused form a wide head.
    """
    if routes.block_rows != tiles.block_rows:
        raise ValueError(
            f"routes lie in blocks of {routes.block_rows}, tiles have block_rows="
            f"{tiles.block_rows}: expected the same."
        )
    banks = (w_gate_EDF, w_up_EDF, w_down_EFD)
    with on_device(x_THD):
        if tiles.fused is not None:
            _run_fused(out_THKD, x_THD, weights_THK, routes, banks, tiles.fused)
            return
        assert tiles.gate_up is not None
        assert tiles.down is not None
        hidden_RF = x_THD.new_empty(routes.num_routes, w_gate_EDF.shape[2])
        _run_gate_up(hidden_RF, x_THD, routes, banks[:2], tiles.gate_up)
        _run_down(out_THKD, hidden_RF, weights_THK, routes, w_down_EFD, tiles.down)


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


def _run_gate_up(
    hidden_RF: torch.Tensor,
    x_THD: torch.Tensor,
    routes: BlockRoutes,
    banks: tuple[torch.Tensor, ...],
    tile: ProductTile,
) -> None:
    from magi2.kernels.grouped_gemm import gate_up_kernel

    heads, (dim, inner) = x_THD.shape[1], banks[0].shape[1:]
    programs = routes.num_blocks * -(-inner // tile.columns)
    gate, up = (_weight(bank, tile.depth, tile.columns, tile.descriptors) for bank in banks)
    gate_up_kernel[_grid(programs, tile.programs_per_unit, x_THD.device)](
        x_THD,
        gate,
        up,
        hidden_RF,
        routes.slots,
        routes.block_expert,
        routes.padded_total,
        routes.num_routes,
        x_THD.stride(0),
        x_THD.stride(1),
        HEADS=heads,
        TOP_K=routes.num_routes // (x_THD.shape[0] * heads),
        D=dim,
        F=inner,
        BLOCK_M=routes.block_rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.depth,
        GROUP_M=tile.group_blocks,
        PERSISTENT=tile.programs_per_unit > 0,
        DESCRIPTORS=tile.descriptors,
        INTERPRETED=interprets(x_THD),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _run_down(
    out_THKD: torch.Tensor,
    hidden_RF: torch.Tensor,
    weights_THK: torch.Tensor,
    routes: BlockRoutes,
    bank: torch.Tensor,
    tile: ProductTile,
) -> None:
    from magi2.kernels.grouped_gemm import down_kernel

    inner, dim = bank.shape[1:]
    programs = routes.num_blocks * -(-dim // tile.columns)
    down_kernel[_grid(programs, tile.programs_per_unit, hidden_RF.device)](
        hidden_RF,
        _weight(bank, tile.depth, tile.columns, tile.descriptors),
        out_THKD,
        weights_THK,
        routes.slots,
        routes.block_expert,
        routes.padded_total,
        routes.num_routes,
        D=dim,
        F=inner,
        BLOCK_M=routes.block_rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.depth,
        GROUP_M=tile.group_blocks,
        PERSISTENT=tile.programs_per_unit > 0,
        DESCRIPTORS=tile.descriptors,
        INTERPRETED=interprets(hidden_RF),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _run_fused(
    out_THKD: torch.Tensor,
    x_THD: torch.Tensor,
    weights_THK: torch.Tensor,
    routes: BlockRoutes,
    banks: tuple[torch.Tensor, ...],
    tile: FusedTile,
) -> None:
    from magi2.kernels.fused_experts import fused_experts_kernel

    heads, (dim, inner) = x_THD.shape[1], banks[0].shape[1:]
    if dim > FUSED_DIM:
        raise ValueError(
            f"head_dim={dim}: expected at most {FUSED_DIM} for the fused form. Use tiles with "
            "gate_up and down."
        )
    block_d = max(16, 1 << (dim - 1).bit_length())
    gate, up = (_weight(bank, block_d, tile.inner, tile.descriptors) for bank in banks[:2])
    fused_experts_kernel[_grid(routes.num_blocks, tile.programs_per_unit, x_THD.device)](
        x_THD,
        gate,
        up,
        _weight(banks[2], tile.inner, block_d, tile.descriptors),
        out_THKD,
        weights_THK,
        routes.slots,
        routes.block_expert,
        routes.padded_total,
        routes.num_routes,
        x_THD.stride(0),
        x_THD.stride(1),
        HEADS=heads,
        TOP_K=routes.num_routes // (x_THD.shape[0] * heads),
        D=dim,
        F=inner,
        BLOCK_M=routes.block_rows,
        BLOCK_D=block_d,
        BLOCK_F=tile.inner,
        PERSISTENT=tile.programs_per_unit > 0,
        DESCRIPTORS=tile.descriptors,
        INTERPRETED=interprets(x_THD),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _weight(bank: torch.Tensor, rows: int, columns: int, descriptors: bool) -> Any:
    """The bank, or a descriptor of its tiles: zeros beyond the edges of each expert's matrix."""
    if not descriptors:
        return bank
    from triton.tools.tensor_descriptor import TensorDescriptor

    if bank.stride(1) * bank.element_size() % 16:
        raise ValueError(
            f"rows of {bank.stride(1)} {bank.dtype} are no multiple of 16 bytes: expected one for "
            "tiles with descriptors=True. Use descriptors=False."
        )
    return TensorDescriptor.from_tensor(bank, [1, rows, columns])


def _grid(programs: int, per_unit: int, device: torch.device) -> tuple[int]:
    """One program a tile, or as many as keep every multiprocessor busy."""
    return (min(programs, per_unit * multiprocessors(device)),) if per_unit else (programs,)
