"""Streams to the maps of one branch: norm, projection, affine, sigmoids, Sinkhorn.

Letters: T tokens, S streams, C channels, N logits of a token: 2 S + S * S, W = S * C.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from magi2.ops.grouped_norm import grouped_norm_torch
from magi2.ops.sinkhorn import sinkhorn_torch

Maps = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class MapWeights:
    """What makes the maps of one branch, all float32 and contiguous.

    Args:
        norm: (groups, W) offsets from 1, one row for all tokens or one for each modality.
        phi: (W, N) projection to the logits of pre, post and res, in this order.
        alphas: Three numbers, (1,) each: for pre, post and res.
        biases: (S,), (S,) and (S, S).
        norm_eps: Added to the mean square.
    """

    norm: torch.Tensor
    phi: torch.Tensor
    alphas: Sequence[torch.Tensor]
    biases: Sequence[torch.Tensor]
    norm_eps: float

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All of them."""
        return [self.norm, self.phi, *self.alphas, *self.biases]


def stream_logits_torch(
    x_TSC: torch.Tensor,
    weights: MapWeights,
    group_sizes: Sequence[int],
    by_stream: bool = False,
) -> torch.Tensor:
    """The normalised streams against phi, (T, N) float32.

    Args:
        x_TSC: In group order.
        weights: Of the branch.
        group_sizes: As in `grouped_norm_torch`.
        by_stream: Whether each stream is multiplied by its own rows of phi and the S results are
            added in ascending order, instead of one product over W. A batched product of short
            rows is what some libraries do well. Sums of W numbers then have another order: the
            bits differ from those of one product, the float32 accuracy does not.
    """
    z_TW = grouped_norm_torch(
        x_TSC.flatten(1), weights.norm, group_sizes, weights.norm_eps, torch.float32
    )
    if not by_stream:
        return z_TW @ weights.phi
    streams = x_TSC.shape[1]
    z_STC = z_TW.unflatten(1, (streams, -1)).transpose(0, 1)
    if torch.compiler.is_compiling():
        # A compiler writes the norm's result in this order, so the product's operand is dense;
        # eagerly it would be a copy, which the product does without. The same bits. The view pins
        # the order: Inductor alone lays the copy out as what it reads.
        dense_STC = z_STC.contiguous()
        z_STC = dense_STC.as_strided(dense_STC.shape, dense_STC.stride())
    products_STN = torch.bmm(z_STC, weights.phi.unflatten(0, (streams, -1)))
    total = products_STN[0]
    for stream in range(1, streams):
        total = total + products_STN[stream]
    return total


def stream_maps_torch(
    logits_TN: torch.Tensor,
    weights: MapWeights,
    dtype: torch.dtype,
    *,
    scale: float,
    iterations: int,
    eps: float,
) -> Maps:
    """Maps `pre`, `post` and `res` of one branch, computed in float32 and rounded once.

    Compiled maps can differ from eager ones in the last places: a compiler has exponentials of its
    own. Inductor's on a CPU rounds another way than torch's in about one number of ten; given the
    same exponentials, the iterations have the same bits.

    Args:
        logits_TN: As `stream_logits_torch` gives them.
        weights: Of the branch.
        dtype: Of the maps.
        scale: Factor on each alpha.
        iterations: Of Sinkhorn.
        eps: Of Sinkhorn.

    Returns:
        (T, S), (T, S) and (T, S, S).
    """
    pre, post, res = (
        alpha * scale * raw + bias
        for alpha, raw, bias in zip(
            weights.alphas,
            split_logits(logits_TN, len(weights.biases[0])),
            weights.biases,
            strict=True,
        )
    )
    return (
        torch.sigmoid(pre).to(dtype),
        (2 * torch.sigmoid(post)).to(dtype),
        sinkhorn_torch(res, iterations, eps).to(dtype),
    )


def split_logits(logits_TN: torch.Tensor, streams: int) -> Maps:
    """Views for pre, post and res: (T, S), (T, S) and (T, S, S)."""
    pre, post, res = logits_TN.split([streams, streams, streams**2], dim=1)
    return pre, post, res.unflatten(1, (streams, streams))
