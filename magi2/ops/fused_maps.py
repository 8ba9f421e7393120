"""Logits to maps in one Triton launch, and the Sinkhorn iterations alone.

Letters: T tokens, S streams, N logits of a token: 2 S + S * S.
"""

from __future__ import annotations

import torch

from magi2.ops.launch import interprets, on_device
from magi2.ops.stream_maps import Maps, MapWeights
from magi2.ops.stream_tiles import (
    DTYPES,
    LOGITS,
    STREAMS,
    LogitParts,
    MapsTile,
    launch_settings,
)

ROW_SUMS = ("left", "interleaved")


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
                **launch_settings(logits, tile.num_warps),
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
                **launch_settings(parts, tile.num_warps),
            )
    return pre, post, res


def _check_row_sums(row_sums: str) -> None:
    if row_sums not in ROW_SUMS:
        raise ValueError(f"row_sums={row_sums!r}: expected one of {ROW_SUMS}.")
