"""Hyper-connections: several residual streams around the two branches of a layer.

Letters: T tokens, S streams, C hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from magi2.config import Magi2Config
from magi2.modules.linear import NORM_EPS, GroupedNorm
from magi2.ops import stream_backend
from magi2.ops.backend import explain
from magi2.ops.stream_maps import MapWeights, split_logits, stream_logits_torch
from magi2.options import Options, logits_by_stream_by_default

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
        options: Which backend runs, how streams are projected and rows added; None for the
            defaults.
    """

    def __init__(
        self,
        config: Magi2Config,
        num_modalities: int,
        device: torch.device | str | None,
        options: Options | None = None,
    ) -> None:
        super().__init__()
        options = options or Options()
        self.mhc_backend = options.mhc_backend
        self.sinkhorn_row_sums = options.sinkhorn_row_sums
        by_stream = options.logits_by_stream
        if by_stream is None:
            by_stream = logits_by_stream_by_default(device)
        self.logits_by_stream = by_stream
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
        y_TC = function(self.mix(x_TSC, maps.pre))
        return self.hyper_connect(x_TSC, y_TC, maps.post, maps.res)

    def maps(self, branch: str, x_TSC: torch.Tensor, group_sizes: Sequence[int]) -> StreamMaps:
        """The three maps of a branch, all from the streams before it; rounded to x's dtype."""
        pre, post, res = stream_backend.make_maps(
            x_TSC,
            self._map_weights(branch),
            group_sizes,
            self.mhc_backend,
            scale=self.scale,
            iterations=SINKHORN_ITERATIONS,
            eps=SINKHORN_EPS,
            by_stream=self.logits_by_stream,
            row_sums=self.sinkhorn_row_sums,
        )
        return StreamMaps(pre=pre, post=post, res=res)

    def mix(self, x_TSC: torch.Tensor, pre_TS: torch.Tensor) -> torch.Tensor:
        """A branch's input from the streams, (T, C): see `mix_streams_torch`."""
        return stream_backend.mix_streams(x_TSC, pre_TS, self.mhc_backend)

    def hyper_connect(
        self,
        x_TSC: torch.Tensor,
        y_TC: torch.Tensor,
        post_TS: torch.Tensor,
        res_TSS: torch.Tensor,
    ) -> torch.Tensor:
        """The next streams: see `hyper_connect_torch`."""
        return stream_backend.hyper_connect(x_TSC, y_TC, post_TS, res_TSS, self.mhc_backend)

    def logits(
        self, branch: str, x_TSC: torch.Tensor, group_sizes: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The normalised streams against phi, float32: (T, S), (T, S) and (T, S, S)."""
        fused = stream_logits_torch(
            x_TSC, self._map_weights(branch), group_sizes, self.logits_by_stream
        )
        return split_logits(fused, self.num_streams)

    def explain(self, branch: str, x_TSC: torch.Tensor) -> str:
        """What would run for these streams, and why, in one line."""
        weights = self._map_weights(branch).tensors
        return explain(stream_backend.choose_stream_backend(self.mhc_backend, x_TSC, weights))

    def _map_weights(self, branch: str) -> MapWeights:
        return MapWeights(
            norm=self.mhc_norm.weight.view(self.mhc_norm.num_groups, -1),
            phi=self._weight("phi_fused", branch),
            alphas=[self._weight(f"alpha_{kind}", branch) for kind in KINDS],
            biases=[self._weight(f"bias_{kind}", branch) for kind in KINDS],
            norm_eps=NORM_EPS,
        )

    def _weight(self, kind: str, branch: str) -> torch.Tensor:
        return self.get_parameter(f"mhc_{kind}_{branch}")
