"""Launches of the routed experts' kernels, one for each form of `ExpertTiles`.

Letters: T tokens, H heads, K choices, R routes, E experts of all heads together, D channels of a
head, F channels inside an expert.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from magi2.ops.expert_tiles import (
    ExpertTiles,
    FusedTile,
    HopperTile,
    ProductTile,
    choose_tiles,
)
from magi2.ops.launch import interprets, is_hopper, multiprocessors, on_device
from magi2.ops.route_build import BlockRoutes

GLUON_VERSIONS = ("3.6",)
FUSED_DIM = 256  # widest head whose float32 row block fits the registers of one program


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
        if tiles.hopper is not None:
            _run_hopper(out_THKD, x_THD, weights_THK, routes, banks, tiles.hopper)
            return
        assert tiles.gate_up is not None
        assert tiles.down is not None
        hidden_RF = x_THD.new_empty(routes.num_routes, w_gate_EDF.shape[2])
        _run_gate_up(hidden_RF, x_THD, routes, banks[:2], tiles.gate_up)
        _run_down(out_THKD, hidden_RF, weights_THK, routes, w_down_EFD, tiles.down)


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


def best_tiles(x_THD: torch.Tensor, inner: int) -> ExpertTiles:
    """The table's tiles for these activations and experts of `inner` channels."""
    hopper = hopper_obstacle(x_THD, inner) is None
    fused = is_hopper(x_THD.device) and x_THD.shape[2] <= FUSED_DIM
    return choose_tiles(x_THD.device.type, x_THD.dtype, hopper=hopper, fused=fused)


def explain_tiles(x_THD: torch.Tensor, inner: int) -> str:
    """The form that `best_tiles` takes, and why not the Hopper form, in one line."""
    form, obstacle = best_tiles(x_THD, inner).form, hopper_obstacle(x_THD, inner)
    return form if obstacle is None else f"{form}, not hopper: {obstacle}"


def hopper_obstacle(x_THD: torch.Tensor, inner: int) -> str | None:
    """Why the Hopper form cannot run on this input, or None.

    Args:
        x_THD: The activations.
        inner: Channels inside an expert.
    """
    dim = x_THD.shape[2]
    if not is_hopper(x_THD.device):
        return f"x is on {x_THD.device}: expected a CUDA device of compute capability 9"
    if x_THD.dtype not in (torch.bfloat16, torch.float16):
        return f"x is {x_THD.dtype}: expected bfloat16 or float16"
    if dim != 256 or inner % 64:
        return f"head_dim={dim} and inner={inner}: expected 256 and a multiple of 64"
    if (x_THD.data_ptr() | x_THD.stride(0) * 2 | x_THD.stride(1) * 2) % 16:
        return f"x has strides {x_THD.stride()}: expected rows at multiples of 16 bytes"
    version = _triton_version()
    # Gluon is an experiment that changes: only what was tried counts.
    if version not in GLUON_VERSIONS:
        return f"Triton is {version}: expected one of {GLUON_VERSIONS}, whose Gluon was tried"
    return None


@functools.cache
def _triton_version() -> str:
    import triton

    return ".".join(str(triton.__version__).split(".")[:2])


def _run_hopper(
    out_THKD: torch.Tensor,
    x_THD: torch.Tensor,
    weights_THK: torch.Tensor,
    routes: BlockRoutes,
    banks: tuple[torch.Tensor, ...],
    tile: HopperTile,
) -> None:
    heads, (dim, inner) = x_THD.shape[1], banks[0].shape[1:]
    obstacle = hopper_obstacle(x_THD, inner)
    if obstacle is not None:
        raise ValueError(f"the Hopper form cannot run: {obstacle}. Use other tiles.")
    from magi2.kernels.hopper_experts import bank_descriptor, hopper_experts_kernel

    gate, up = (bank_descriptor(bank, 128, 64) for bank in banks[:2])
    hopper_experts_kernel[_grid(routes.num_blocks, 1, x_THD.device)](
        x_THD,
        gate,
        up,
        bank_descriptor(banks[2], 64, dim),
        out_THKD,
        weights_THK,
        routes.slots,
        routes.block_expert,
        routes.padded_total,
        torch.zeros(1, dtype=torch.int32, device=x_THD.device),
        routes.num_routes,
        x_THD.stride(0),
        x_THD.stride(1),
        HEADS=heads,
        TOP_K=routes.num_routes // (x_THD.shape[0] * heads),
        F=inner,
        SLOTS=tile.slots,
        num_warps=4,
        # Of each thread at the start; the groups then take what the fetching warp gives back.
        maxnreg=168,
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
