"""One transformer layer, and the stack of them."""

from __future__ import annotations

import torch
from torch import nn

from magi2.config import Magi2Config
from magi2.modules.attention import Attention
from magi2.modules.mhc import HyperConnections
from magi2.modules.mlp import DenseMlp
from magi2.modules.moe import MultiHeadMoe
from magi2.modules.request import RequestPlan
from magi2.options import Options
from magi2.topology import Topology


class TransformerLayer(HyperConnections):
    """Attention, then an MLP, each between the residual streams.

    Args:
        config: The model's.
        options: Passed to the hyper-connections and the branches.
        topology: Passed to the branches.
        layer: Index of the layer; says how many weight sets it has and which MLP.
        device: Of the weights.
    """

    def __init__(
        self,
        config: Magi2Config,
        options: Options,
        topology: Topology,
        layer: int,
        device: torch.device | str | None,
    ) -> None:
        num_modalities = config.num_modalities(layer)
        super().__init__(config, num_modalities, device, options)
        self.attention = Attention(config, options, topology, num_modalities, device)
        self.mlp: MultiHeadMoe | DenseMlp
        if layer in config.moe.layers:
            self.mlp = MultiHeadMoe(config, options, topology, device)
        else:
            self.mlp = DenseMlp(config, num_modalities, device)

    def forward(self, x_TSC: torch.Tensor, plan: RequestPlan) -> torch.Tensor:
        """(tokens, streams, hidden) in modality order to the same."""
        sizes = plan.order.group_sizes
        x_TSC = self.connect("attn", x_TSC, lambda u: self.attention(u, plan), sizes)
        return self.connect("mlp", x_TSC, lambda u: self.mlp(u, plan), sizes)


class Block(nn.Module):
    """The stack of layers, run in modality order.

    Args:
        config: The model's.
        options: Passed to the layers.
        topology: Passed to the layers.
        device: Of the weights.
    """

    def __init__(
        self,
        config: Magi2Config,
        options: Options,
        topology: Topology,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.num_streams = config.num_streams
        self.layers = nn.ModuleList(
            TransformerLayer(config, options, topology, layer, device)
            for layer in range(config.num_layers)
        )

    def forward(self, x: torch.Tensor, plan: RequestPlan) -> torch.Tensor:
        """(tokens, stream_width) in packed order and the activation dtype to the same."""
        x_TSC = plan.order.group(x).unflatten(1, (self.num_streams, -1))
        for layer in self.layers:
            x_TSC = layer(x_TSC, plan)
        return plan.order.ungroup(x_TSC.flatten(1))
