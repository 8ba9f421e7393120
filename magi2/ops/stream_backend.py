"""Which implementation of the hyper-connections runs, and why: the one place that decides.

"torch" is the plain reference, "triton" the kernels or an error that says why not, "auto" takes
Triton on the kinds of device listed here, as long as no gradient is recorded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from magi2.ops import fused_streams, traced_streams
from magi2.ops.backend import tensor_obstacle
from magi2.ops.stream_maps import Maps, MapWeights, stream_logits_torch, stream_maps_torch
from magi2.ops.stream_mix import hyper_connect_torch, mix_streams_torch
from magi2.ops.stream_tiles import STREAMS
from ulysses_comm.hardware import Choice

MHC_BACKENDS = ("auto", "torch", "triton")

# Kinds of device on which the kernels were measured to be faster than torch, by
# `benchmarks/bench_mhc.py`, and passed the tests marked `gpu`.
MEASURED_FASTER = frozenset({"cuda"})


def choose_stream_backend(
    requested: str, x_TSC: torch.Tensor, others: Sequence[torch.Tensor]
) -> Choice:
    """Decide for streams and what they meet: weights, or maps and a branch's output.

    Args:
        requested: One of `MHC_BACKENDS`.
        x_TSC: The streams.
        others: The other tensors of the operation.

    Returns:
        "torch" or "triton", with the reason.

    Raises:
        ValueError: If `requested` is no backend.
        RuntimeError: If it is "triton" and Triton cannot do this.
    """
    if requested not in MHC_BACKENDS:
        raise ValueError(f"mhc_backend={requested!r}: expected one of {MHC_BACKENDS}.")
    if requested == "torch":
        return Choice("torch", "asked for")
    kind = x_TSC.device.type
    if requested == "auto" and kind not in MEASURED_FASTER:
        return Choice("torch", f"the kernels were not measured to be faster on {kind}")
    obstacle = _obstacle(x_TSC, others, explicit=requested == "triton")
    if obstacle is None:
        reason = "asked for" if requested == "triton" else f"measured to be faster on {kind}"
        return Choice("triton", reason)
    if requested == "triton":
        raise RuntimeError(
            f"mhc_backend='triton' cannot run: {obstacle}. Use 'auto', which takes torch then."
        )
    return Choice("torch", obstacle)


def make_maps(
    x_TSC: torch.Tensor,
    weights: MapWeights,
    group_sizes: Sequence[int],
    backend: str,
    *,
    scale: float,
    iterations: int,
    eps: float,
    by_stream: bool = False,
    row_sums: str = "left",
) -> Maps:
    """Maps `pre`, `post` and `res` of a branch from the streams before it, in x's dtype.

    Arguments as in `stream_logits_torch`, of which only the torch form reads `by_stream`, and in
    `stream_maps_triton`, of which only the Triton form reads `row_sums`; `backend` as in
    `choose_stream_backend`.
    """
    if choose_stream_backend(backend, x_TSC, weights.tensors).name == "torch":
        logits = stream_logits_torch(x_TSC, weights, group_sizes, by_stream)
        return stream_maps_torch(
            logits, weights, x_TSC.dtype, scale=scale, iterations=iterations, eps=eps
        )
    if torch.compiler.is_compiling():
        pre, post, res = traced_streams.stream_maps(
            x_TSC,
            weights.norm,
            weights.phi,
            list(weights.alphas),
            list(weights.biases),
            weights.norm_eps,
            list(group_sizes),
            scale,
            iterations,
            eps,
            row_sums,
        )
        return pre, post, res
    return traced_streams.make_maps_triton(
        x_TSC,
        weights,
        group_sizes,
        scale=scale,
        iterations=iterations,
        eps=eps,
        row_sums=row_sums,
    )


def mix_streams(x_TSC: torch.Tensor, pre_TS: torch.Tensor, backend: str) -> torch.Tensor:
    """`mix_streams_torch`, by the backend: the same bits."""
    if choose_stream_backend(backend, x_TSC, [pre_TS]).name == "torch":
        return mix_streams_torch(x_TSC, pre_TS)
    if torch.compiler.is_compiling():
        mixed: torch.Tensor = traced_streams.mix_streams(x_TSC, pre_TS)
        return mixed
    return fused_streams.mix_streams_triton(x_TSC, pre_TS)


def hyper_connect(
    x_TSC: torch.Tensor,
    y_TC: torch.Tensor,
    post_TS: torch.Tensor,
    res_TSS: torch.Tensor,
    backend: str,
) -> torch.Tensor:
    """`hyper_connect_torch`, by the backend: the same bits."""
    if choose_stream_backend(backend, x_TSC, [y_TC, post_TS, res_TSS]).name == "torch":
        return hyper_connect_torch(x_TSC, y_TC, post_TS, res_TSS)
    if torch.compiler.is_compiling():
        streams: torch.Tensor = traced_streams.hyper_connect(x_TSC, y_TC, post_TS, res_TSS)
        return streams
    return fused_streams.hyper_connect_triton(x_TSC, y_TC, post_TS, res_TSS)


def _obstacle(x_TSC: torch.Tensor, others: Sequence[torch.Tensor], *, explicit: bool) -> str | None:
    """Why Triton cannot do this, or None; `explicit` as in `tensor_obstacle`."""
    obstacle = tensor_obstacle(x_TSC, others, explicit=explicit)
    if obstacle is not None:
        return obstacle
    if x_TSC.shape[1] != STREAMS:
        return f"x has {x_TSC.shape[1]} streams, and the kernels are written for 4"
    if not fused_streams.adjacent(x_TSC):
        return f"x has strides {x_TSC.stride()}, and the kernels read adjacent streams"
    return None
