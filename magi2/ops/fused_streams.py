"""Launches of the hyper-connections' Triton kernels, which are written for four streams.

Letters: T tokens, S streams, C channels, N logits of a token: 2 S + S * S.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from magi2.ops.launch import interprets, on_device
from magi2.ops.stream_maps import Maps, MapWeights

STREAMS = 4
LOGITS = 2 * STREAMS + STREAMS**2
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROW_SUMS = ("left", "interleaved")


@dataclass(frozen=True, kw_only=True)
class MixTile:
    """How mixing and hyper-connecting are cut into programs; no bit depends on it.

    Attributes:
        tokens: Of a program, one after the other.
        channels: Of a program, a power of two.
        num_warps: Warps of a program.
    """

    tokens: int = 1
    channels: int = 1024
    num_warps: int = 4


@dataclass(frozen=True, kw_only=True)
class LogitsTile:
    """How the projection is cut into programs; sums of other parts are rounded otherwise.

    Attributes:
        tokens: Of a program, a power of two from 16 on.
        depth: Channels of one product, a power of two from 16 on.
        parts: Programs that share the channels of a token.
        num_warps: Warps of a program.
        num_stages: Steps whose loads are in flight.
    """

    tokens: int = 64
    depth: int = 64
    parts: int = 4
    num_warps: int = 4
    num_stages: int = 3


# The fused form holds a tile of each stream and the branch: half as many channels, over more
# threads, keep them in registers.
CONNECT_TILE = LogitsTile(depth=32, num_warps=8)


@dataclass(frozen=True, kw_only=True)
class MapsTile:
    """How the maps are cut into programs, and how they divide; no bit depends on it.

    Attributes:
        tokens: Of a program, a power of two; a thread owns tokens / (32 * num_warps) of them.
        num_warps: Warps of a program.
        fast: Whether divisions share reciprocals, see `magi2.kernels.stream_maps`. Under the
            interpreter, which rounds fused multiply-adds twice, they never do.
    """

    tokens: int = 32
    num_warps: int = 1
    fast: bool = False


@dataclass(frozen=True, kw_only=True)
class LogitParts:
    """Logits that miss the norm's scale, in parts that are still to be added.

    Attributes:
        parts: (parts, N + 1, T) float32; the last row holds sums of squares.
        width: Numbers in such a sum.
        eps: Added to the mean square.
    """

    parts: torch.Tensor
    width: int
    eps: float


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
                **_common(x_TSC, tile.num_warps),
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
                **_common(x_TSC, tile.num_warps),
            )
    return out


def sinkhorn_triton(
    logits: torch.Tensor,
    iterations: int,
    eps: float,
    *,
    exponentiate: bool = True,
    row_sums: str = "left",
    out_dtype: torch.dtype = torch.float32,
    tile: MapsTile | None = None,
) -> torch.Tensor:
    """`sinkhorn_torch` of (T, 4, 4) float32, any strides, in one launch.

    Args:
        logits: What is exponentiated, or weights that are already.
        iterations: As in `sinkhorn_torch`.
        eps: As in `sinkhorn_torch`.
        exponentiate: False where logits are weights: then the bits are those of torch everywhere.
        row_sums: "left" folds, or "interleaved" as eager torch adds rows on CUDA.
        out_dtype: Of the result, rounded once.
        tile: How to cut the work.

    Returns:
        (T, 4, 4) of out_dtype.

    Raises:
        ValueError: If logits are not (T, 4, 4) float32, or for an unknown order or dtype.
    """
    from magi2.kernels.stream_maps import sinkhorn_kernel

    tile = tile or MapsTile()
    _check_row_sums(row_sums)
    if logits.dim() != 3 or logits.shape[1:] != (STREAMS, STREAMS):
        raise ValueError(f"logits are {list(logits.shape)}: expected (tokens, 4, 4) float32.")
    if logits.dtype != torch.float32 or out_dtype not in DTYPES:
        raise ValueError(
            f"logits are {logits.dtype}, out_dtype={out_dtype}: expected float32 and {DTYPES}."
        )
    tokens = logits.shape[0]
    out = logits.new_empty(logits.shape, dtype=out_dtype)
    if tokens:
        with on_device(logits):
            sinkhorn_kernel[(-(-tokens // tile.tokens),)](
                logits,
                out,
                tokens,
                *logits.stride(),
                ITERATIONS=iterations,
                EPS=eps,
                BLOCK_T=tile.tokens,
                EXPONENTIATE=exponentiate,
                INTERLEAVED=row_sums == "interleaved",
                FAST=tile.fast and not interprets(logits),
                **_common(logits, tile.num_warps),
            )
    return out


def stream_maps_triton(
    logits: torch.Tensor | LogitParts,
    weights: MapWeights,
    dtype: torch.dtype,
    *,
    scale: float,
    iterations: int,
    eps: float,
    row_sums: str = "left",
    tile: MapsTile | None = None,
) -> Maps:
    """`stream_maps_torch` in one launch; its bits but for those of the exponential.

    Args:
        logits: (T, N) float32, or what `stream_logits_triton` gives.
        weights: Of the branch.
        dtype: Of the maps.
        scale: Factor on each alpha.
        iterations: Of Sinkhorn.
        eps: Of Sinkhorn.
        row_sums: As in `sinkhorn_triton`.
        tile: How to cut the work.

    Returns:
        (T, S), (T, S) and (T, S, S).
    """
    from magi2.kernels.stream_maps import stream_maps_kernel

    tile = tile or MapsTile()
    _check_row_sums(row_sums)
    parts = logits.parts if isinstance(logits, LogitParts) else logits.t()[None]
    tokens = parts.shape[2]
    if parts.shape[1] != LOGITS + isinstance(logits, LogitParts) or parts.dtype != torch.float32:
        raise ValueError(
            f"logits are {list(parts.shape)} {parts.dtype}: expected (tokens, {LOGITS}) float32."
        )
    pre, post = (parts.new_empty(tokens, STREAMS, dtype=dtype) for _ in range(2))
    res = parts.new_empty(tokens, STREAMS, STREAMS, dtype=dtype)
    if tokens:
        with on_device(parts):
            stream_maps_kernel[(-(-tokens // tile.tokens),)](
                parts,
                *weights.alphas,
                *(bias.contiguous() for bias in weights.biases),
                pre,
                post,
                res,
                tokens,
                parts.stride(2),
                parts.stride(1),
                parts.stride(0),
                scale,
                WIDTH=logits.width if isinstance(logits, LogitParts) else 1,
                NORM_EPS=logits.eps if isinstance(logits, LogitParts) else 0.0,
                ITERATIONS=iterations,
                EPS=eps,
                PARTS=parts.shape[0] if isinstance(logits, LogitParts) else 0,
                BLOCK_T=tile.tokens,
                INTERLEAVED=row_sums == "interleaved",
                FAST=tile.fast and not interprets(parts),
                **_common(parts, tile.num_warps),
            )
    return pre, post, res


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
    _check_streams(x_TSC)
    return _launch_logits(x_TSC, None, weights, group_sizes, tile or LogitsTile())


def connect_and_project_triton(
    x_TSC: torch.Tensor,
    y_TC: torch.Tensor,
    post_TS: torch.Tensor,
    res_TSS: torch.Tensor,
    weights: MapWeights,
    group_sizes: Sequence[int],
    tile: LogitsTile | None = None,
) -> tuple[torch.Tensor, LogitParts]:
    """`hyper_connect_triton`, and `stream_logits_triton` of its result, which is not read again.

    The streams have the bits of `hyper_connect_triton`, the logits those of `stream_logits_triton`
    up to float32 roundings; `weights` are the next branch's, `num_stages` of the tile is not used.
    """
    y_TC = _check_connect(x_TSC, y_TC, post_TS, res_TSS)
    out = x_TSC.new_empty(x_TSC.shape)
    connect = (y_TC, post_TS.contiguous(), res_TSS.contiguous(), out)
    return out, _launch_logits(x_TSC, connect, weights, group_sizes, tile or CONNECT_TILE)


def _launch_logits(
    x_TSC: torch.Tensor,
    connect: tuple[torch.Tensor, ...] | None,
    weights: MapWeights,
    group_sizes: Sequence[int],
    tile: LogitsTile,
) -> LogitParts:
    from magi2.kernels.stream_logits import stream_logits_kernel

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
        y, post, res, out = connect or (x_TSC,) * 4
        grid = (sum(-(-size // tile.tokens) for size in sizes), num_parts)
        with on_device(x_TSC):
            stream_logits_kernel[grid](
                x_TSC,
                y,
                post,
                res,
                out,
                weights.norm,
                weights.phi,
                parts,
                tokens,
                *sizes,
                x_TSC.stride(0),
                y.stride(0),
                C=channels,
                N=LOGITS,
                CHANNELS=share,
                BLOCK_T=tile.tokens,
                BLOCK_N=32,
                BLOCK_K=tile.depth,
                CONNECT=connect is not None,
                # What the fused form has just stored it reads again: nothing may be read ahead.
                num_stages=tile.num_stages if connect is None else 1,
                **_common(x_TSC, tile.num_warps),
            )
    return LogitParts(parts=parts, width=width, eps=weights.norm_eps)


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


def _common(tensor: torch.Tensor, num_warps: int) -> dict[str, Any]:
    """Every launch keeps products and sums apart: the bits of eager torch depend on it."""
    return {
        "INTERPRETED": interprets(tensor),
        "num_warps": num_warps,
        "enable_fp_fusion": False,
    }


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


def _check_row_sums(row_sums: str) -> None:
    if row_sums not in ROW_SUMS:
        raise ValueError(f"row_sums={row_sums!r}: expected one of {ROW_SUMS}.")
