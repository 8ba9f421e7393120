"""Passes over the streams, as Triton launches: mixing, connecting, projecting to logits.

Letters: T tokens, S streams, C channels, N logits of a token: 2 S + S * S.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from magi2.ops.launch import on_device
from magi2.ops.stream_maps import MapWeights
from magi2.ops.stream_tiles import (
    DTYPES,
    LOGITS,
    STREAMS,
    LogitParts,
    LogitsTile,
    MixTile,
    launch_settings,
)

COLUMNS = 32  # of a product: the logits, filled up to what a matrix unit takes


def mix_streams_triton(
    x_TSC: torch.Tensor, pre_TS: torch.Tensor, tile: MixTile | None = None
) -> torch.Tensor:
    """`mix_streams_torch` in one launch: the same bits."""
    from magi2.kernels.stream_mix import mix_streams_kernel

    _check_streams(x_TSC)
    tile = tile or MixTile()
    tokens, streams, channels = x_TSC.shape
    _check_shape("pre", pre_TS, (tokens, streams))
    out = x_TSC.new_empty(tokens, channels)
    if out.numel():
        with on_device(x_TSC):
            mix_streams_kernel[_mix_grid(tokens, channels, tile)](
                x_TSC,
                pre_TS.contiguous(),
                out,
                tokens,
                x_TSC.stride(0),
                C=channels,
                TOKENS=tile.tokens,
                BLOCK_C=tile.channels,
                **launch_settings(x_TSC, tile.num_warps),
            )
    return out


def hyper_connect_triton(
    x_TSC: torch.Tensor,
    y_TC: torch.Tensor,
    post_TS: torch.Tensor,
    res_TSS: torch.Tensor,
    tile: MixTile | None = None,
) -> torch.Tensor:
    """`hyper_connect_torch` in one launch: the same bits."""
    from magi2.kernels.stream_mix import hyper_connect_kernel

    tile = tile or MixTile()
    y_TC = _check_connect(x_TSC, y_TC, post_TS, res_TSS)
    tokens, _, channels = x_TSC.shape
    out = x_TSC.new_empty(x_TSC.shape)
    if out.numel():
        with on_device(x_TSC):
            hyper_connect_kernel[_mix_grid(tokens, channels, tile)](
                x_TSC,
                y_TC,
                post_TS.contiguous(),
                res_TSS.contiguous(),
                out,
                tokens,
                x_TSC.stride(0),
                y_TC.stride(0),
                C=channels,
                TOKENS=tile.tokens,
                BLOCK_C=tile.channels,
                **launch_settings(x_TSC, tile.num_warps),
            )
    return out


def stream_logits_triton(
    x_TSC: torch.Tensor,
    weights: MapWeights,
    group_sizes: Sequence[int],
    tile: LogitsTile | None = None,
) -> LogitParts:
    """Norm and projection of the streams in one pass: what `stream_maps_triton` takes.

    Args:
        x_TSC: In group order.
        weights: Of the branch; the norm's rows belong to the groups.
        group_sizes: Tokens of each group; not read when there is one.
        tile: How to cut the work.
    """
    from magi2.kernels import stream_logits as kernels

    _check_streams(x_TSC)
    tile = tile or LogitsTile()
    tokens, streams, channels = x_TSC.shape
    width, sizes = streams * channels, _three_sizes(tokens, weights, group_sizes)
    _check_shape("norm", weights.norm, (weights.norm.shape[0], width))
    _check_shape("phi", weights.phi, (width, LOGITS))
    if not (weights.norm.is_contiguous() and weights.phi.is_contiguous()):
        raise ValueError("norm or phi is strided: expected contiguous weights.")
    steps = -(-channels // tile.depth)
    share = -(-steps // tile.parts) * tile.depth
    num_parts = -(-channels // share) if channels else 0
    parts = x_TSC.new_empty(num_parts, LOGITS + 1, tokens, dtype=torch.float32)
    if parts.numel():
        grid = (sum(-(-size // tile.tokens) for size in sizes), num_parts)
        with on_device(x_TSC):
            split = weights.norm
            if x_TSC.dtype == torch.bfloat16:
                split = _split_matrix(weights, width)
            kernels.stream_logits_kernel[grid](
                x_TSC,
                weights.norm,
                weights.phi,
                split,
                parts,
                tokens,
                *sizes,
                x_TSC.stride(0),
                C=channels,
                N=LOGITS,
                CHANNELS=share,
                BLOCK_T=tile.tokens,
                BLOCK_N=COLUMNS,
                BLOCK_K=tile.depth,
                num_stages=tile.num_stages,
                **launch_settings(x_TSC, tile.num_warps),
            )
    return LogitParts(parts=parts, width=width, eps=weights.norm_eps)


def _split_matrix(weights: MapWeights, width: int) -> torch.Tensor:
    """What the product of bfloat16 streams reads: see `split_matrix_kernel`."""
    from magi2.kernels.stream_logits import split_matrix_kernel

    groups = weights.norm.shape[0]
    split = weights.phi.new_empty(groups, 3, width, COLUMNS, dtype=torch.bfloat16)
    split_matrix_kernel[(-(-width // 64), groups)](
        weights.norm,
        weights.phi,
        split,
        ROWS=width,
        N=LOGITS,
        BLOCK_R=64,
        BLOCK_N=COLUMNS,
        **launch_settings(weights.phi, 4),
    )
    return split


def _three_sizes(
    tokens: int, weights: MapWeights, group_sizes: Sequence[int]
) -> tuple[int, int, int]:
    groups = weights.norm.shape[0]
    if groups == 1:
        return tokens, 0, 0
    if groups != len(group_sizes) or groups > 3 or sum(group_sizes) != tokens:
        raise ValueError(
            f"group_sizes={list(group_sizes)} for {groups} weight sets and {tokens} tokens: "
            "expected a size for each set, at most three, that add up to the tokens."
        )
    first, second, third = [*group_sizes, 0][:3]
    return first, second, third


def _mix_grid(tokens: int, channels: int, tile: MixTile) -> tuple[int, int]:
    return -(-tokens // tile.tokens), -(-channels // tile.channels)


def _check_connect(
    x_TSC: torch.Tensor, y_TC: torch.Tensor, post_TS: torch.Tensor, res_TSS: torch.Tensor
) -> torch.Tensor:
    """The branch's output with adjacent channels, once all shapes fit."""
    _check_streams(x_TSC)
    tokens, streams, channels = x_TSC.shape
    _check_shape("y", y_TC, (tokens, channels))
    _check_shape("post", post_TS, (tokens, streams))
    _check_shape("res", res_TSS, (tokens, streams, streams))
    return y_TC if channels < 2 or y_TC.stride(1) == 1 else y_TC.contiguous()


def _check_streams(x_TSC: torch.Tensor) -> None:
    if x_TSC.dim() != 3 or x_TSC.shape[1] != STREAMS or x_TSC.dtype not in DTYPES:
        raise ValueError(
            f"x is {list(x_TSC.shape)} {x_TSC.dtype}: expected (tokens, 4, channels) in {DTYPES}."
        )
    if not adjacent(x_TSC):
        raise ValueError(
            f"x has strides {x_TSC.stride()}: expected the channels of a token's streams adjacent."
        )


def adjacent(x_TSC: torch.Tensor) -> bool:
    """Whether each token's streams lie one behind the other."""
    channels = x_TSC.shape[2]
    return x_TSC.numel() == 0 or (
        (channels == 1 or x_TSC.stride(2) == 1) and x_TSC.stride(1) == channels
    )


def _check_shape(name: str, tensor: torch.Tensor, expected: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != expected:
        raise ValueError(f"{name} is {list(tensor.shape)}: expected {list(expected)}.")
