"""Hyper-connections: several residual streams around the two branches of a layer.

Letters: T tokens, S streams, C hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from magi2.config import Magi2Config
from magi2.modules.linear import GroupedNorm
from magi2.ops.sinkhorn import sinkhorn_torch
from magi2.ops.stream_mix import hyper_connect_torch, mix_streams_torch

SINKHORN_ITERATIONS = 20
SINKHORN_EPS = 1e-12
BRANCHES = ("attn", "mlp")
KINDS = ("pre", "post", "res")


@dataclass(frozen=True, kw_only=True)
class StreamMaps:
    """How one branch reads and writes the streams, in the activation dtype.

    Args:
        pre: (T, S) weight of each stream in the branch's input.
        post: (T, S) weight of the branch's output in each stream.
        res: (T, S, S) mixture of the old streams in each new one; nearly doubly stochastic.
    """

    pre: torch.Tensor
    post: torch.Tensor
    res: torch.Tensor


class HyperConnections(nn.Module):
    """The streams of one layer and the maps of its two branches, "attn" and "mlp".

    A layer inherits from this, because the released names put these weights beside the branches.

    Args:
        config: The model's.
        num_modalities: Weight sets of the norm, which both branches share: 3 or 1.
        device: Of the weights, all float32.
    """

    def __init__(
        self, config: Magi2Config, num_modalities: int, device: torch.device | str | None
    ) -> None:
        super().__init__()
        streams, width = config.num_streams, config.stream_width
        self.num_streams = streams
        self.scale = width**-0.5
        self.mhc_norm = GroupedNorm(width, num_modalities, device, torch.float32)
        bias_shapes = {"pre": (streams,), "post": (streams,), "res": (streams, streams)}
        shapes: dict[str, tuple[int, ...]] = {}
        for branch in BRANCHES:
            for kind, bias_shape in bias_shapes.items():
                shapes[f"mhc_alpha_{kind}_{branch}"] = (1,)
                shapes[f"mhc_bias_{kind}_{branch}"] = bias_shape
            shapes[f"mhc_phi_fused_{branch}"] = (width, 2 * streams + streams**2)
        for name, shape in shapes.items():
            weight = torch.empty(shape, dtype=torch.float32, device=device)
            self.register_parameter(name, nn.Parameter(weight))

    def connect(
        self,
        branch: str,
        x_TSC: torch.Tensor,
        function: Callable[[torch.Tensor], torch.Tensor],
        group_sizes: Sequence[int],
    ) -> torch.Tensor:
        """Run a branch on a mixture of the streams and add its output to all of them.

        Args:
            branch: "attn" or "mlp".
            x_TSC: Streams in modality order.
            function: The branch, (tokens, hidden) to the same.
            group_sizes: Tokens of each modality.

        Returns:
            The next streams, x's shape and dtype.
        """
        maps = self.maps(branch, x_TSC, group_sizes)
        y_TC = function(mix_streams_torch(x_TSC, maps.pre))
        return hyper_connect_torch(x_TSC, y_TC, maps.post, maps.res)

    def maps(self, branch: str, x_TSC: torch.Tensor, group_sizes: Sequence[int]) -> StreamMaps:
        """The three maps of a branch, all from the streams before it; rounded to x's dtype."""
        pre, post, res = (
            self._weight(f"alpha_{kind}", branch) * self.scale * raw
            + self._weight(f"bias_{kind}", branch)
            for kind, raw in zip(KINDS, self.logits(branch, x_TSC, group_sizes), strict=True)
        )
        return StreamMaps(
            pre=torch.sigmoid(pre).to(x_TSC.dtype),
            post=(2 * torch.sigmoid(post)).to(x_TSC.dtype),
            res=sinkhorn_torch(res, SINKHORN_ITERATIONS, SINKHORN_EPS).to(x_TSC.dtype),
        )

    def logits(
        self, branch: str, x_TSC: torch.Tensor, group_sizes: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The normalised streams against phi, float32: (T, S), (T, S) and (T, S, S)."""
        streams = self.num_streams
        fused = self.mhc_norm(x_TSC.flatten(1), group_sizes) @ self._weight("phi_fused", branch)
        pre, post, res = fused.split([streams, streams, streams**2], dim=1)
        return pre, post, res.unflatten(1, (streams, streams))

    def _weight(self, kind: str, branch: str) -> torch.Tensor:
        return self.get_parameter(f"mhc_{kind}_{branch}")
