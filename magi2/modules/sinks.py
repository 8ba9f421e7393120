"""What the sinks of a layer add to its softmax, worked out once a request."""

from __future__ import annotations

from collections.abc import Hashable
from weakref import WeakKeyDictionary

import torch
from torch import nn

from magi2.ops.attention import sink_totals_torch


class SinkTotals:
    """Log-sum-exps of the layers' sinks, for the heads that a rank holds.

    A request's plan owns one, so that they are worked out at its first step and read at the others.
    A total is worked out again if the sinks were written to, moved or replaced since; a write that
    hides from their version counter, as through `.data`, is seen by the next request. With a single
    sink, as released, nothing is worked out at all: the total is a view of it.
    """

    def __init__(self) -> None:
        self._kept: WeakKeyDictionary[nn.Module, tuple[Hashable, torch.Tensor]] = (
            WeakKeyDictionary()
        )

    def of(
        self, layer: nn.Module, sinks_KH: torch.Tensor, rank: int, world_size: int
    ) -> torch.Tensor:
        """(heads / world_size,) float32: the log-sum-exp of the sinks of a rank's heads.

        Args:
            layer: Whose sinks they are; nothing keeps it, or them, alive.
            sinks_KH: (sinks, heads) of all ranks.
            rank: Whose heads to return, of world_size consecutive shares.
            world_size: Divides the heads.
        """
        own = sinks_KH.chunk(world_size, dim=1)[rank]
        recorded = torch.is_grad_enabled() and sinks_KH.requires_grad
        plain = type(sinks_KH) in (torch.Tensor, nn.Parameter)
        if len(own) == 1 or recorded or not plain or torch.compiler.is_compiling():
            return sink_totals_torch(own)
        key = (_state_of(sinks_KH), rank, world_size, torch.is_inference_mode_enabled())
        kept = self._kept.get(layer)
        if kept is None or kept[0] != key:
            kept = self._kept[layer] = (key, sink_totals_torch(own))
        return kept[1]


def _state_of(tensor: torch.Tensor) -> Hashable:
    """What changes when the tensor is written to, moved or replaced."""
    version = None if tensor.is_inference() else tensor._version
    return (id(tensor), tensor.data_ptr(), version, tensor.shape, tensor.dtype, tensor.device)
