"""The hyper-connections' Triton kernels as operators that a compiler takes whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from magi2.ops.fused_maps import stream_maps_triton
from magi2.ops.fused_streams import (
    hyper_connect_triton,
    mix_streams_triton,
    stream_logits_triton,
)
from magi2.ops.stream_maps import Maps, MapWeights


@torch.library.custom_op("magi2::mix_streams", mutates_args=())
def mix_streams(x_TSC: torch.Tensor, pre_TS: torch.Tensor) -> torch.Tensor:
    """`mix_streams_triton`."""
    return mix_streams_triton(x_TSC, pre_TS)


@mix_streams.register_fake
def _(x_TSC: torch.Tensor, pre_TS: torch.Tensor) -> torch.Tensor:
    return x_TSC.new_empty(x_TSC.shape[0], x_TSC.shape[2])


@torch.library.custom_op("magi2::hyper_connect", mutates_args=())
def hyper_connect(
    x_TSC: torch.Tensor, y_TC: torch.Tensor, post_TS: torch.Tensor, res_TSS: torch.Tensor
) -> torch.Tensor:
    """`hyper_connect_triton`."""
    return hyper_connect_triton(x_TSC, y_TC, post_TS, res_TSS)


@hyper_connect.register_fake
def _(
    x_TSC: torch.Tensor, y_TC: torch.Tensor, post_TS: torch.Tensor, res_TSS: torch.Tensor
) -> torch.Tensor:
    return x_TSC.new_empty(x_TSC.shape)


def make_maps_triton(
    x_TSC: torch.Tensor, weights: MapWeights, group_sizes: Sequence[int], **settings: Any
) -> Maps:
    """Maps of a branch in x's dtype, in three launches; settings as in `stream_maps_triton`."""
    logits = stream_logits_triton(x_TSC, weights, group_sizes)
    return stream_maps_triton(logits, weights, x_TSC.dtype, **settings)


@torch.library.custom_op("magi2::stream_maps", mutates_args=())
def stream_maps(
    x_TSC: torch.Tensor,
    norm_GW: torch.Tensor,
    phi_WN: torch.Tensor,
    alphas: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    norm_eps: float,
    group_sizes: Sequence[int],
    scale: float,
    iterations: int,
    eps: float,
    row_sums: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`stream_maps_triton` of `stream_logits_triton`, in x's dtype."""
    weights = MapWeights(norm=norm_GW, phi=phi_WN, alphas=alphas, biases=biases, norm_eps=norm_eps)
    settings = {"scale": scale, "iterations": iterations, "eps": eps, "row_sums": row_sums}
    return make_maps_triton(x_TSC, weights, group_sizes, **settings)


@stream_maps.register_fake
def _(
    x_TSC: torch.Tensor,
    norm_GW: torch.Tensor,
    phi_WN: torch.Tensor,
    alphas: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    norm_eps: float,
    group_sizes: Sequence[int],
    scale: float,
    iterations: int,
    eps: float,
    row_sums: str,
) -> Maps:
    tokens, streams, _ = x_TSC.shape
    pre, post = (x_TSC.new_empty(tokens, streams) for _ in range(2))
    return pre, post, x_TSC.new_empty(tokens, streams, streams)
