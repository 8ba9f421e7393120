"""Forms written here: permute and concatenate, and the fewest copies that one can do by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from benchmarks.peers.way import OUTPUT, QKV, Way

PLAIN = "permute, concatenate"
BY_HAND = "by hand, kept"


def permute_and_concatenate() -> list[Way]:
    """The plain formulation: permute each input, concatenate, exchange; permute the output."""
    return [Way(PLAIN, QKV, _plain_scatter_heads), Way(PLAIN, OUTPUT, _plain_scatter_seqlen)]


def by_hand() -> list[Way]:
    """Straight-line code with kept buffers and one copy where there has to be one.

    The Q/K/V exchange is one collective; its backward sends each gradient as it lies, which is
    three collectives and saves the copy of bringing them together.
    """
    hands = _Hands()
    return [
        Way(BY_HAND, QKV, hands.scatter_heads, with_gradients=hands.scatter_heads_and_back),
        Way(BY_HAND, OUTPUT, hands.scatter_seqlen, with_gradients=hands.scatter_seqlen_and_back),
    ]


def _plain_scatter_heads(
    tensors: Sequence[torch.Tensor], split_sizes: Sequence[int], group: dist.ProcessGroup
) -> list[torch.Tensor]:
    tokens, world_size = split_sizes[group.rank()], group.size()
    shards = [tensor.unflatten(1, (world_size, -1)) for tensor in tensors]
    permuted = [shard.permute(1, 0, 2, 3).contiguous() for shard in shards]
    send = torch.cat(permuted, dim=2).flatten(0, 1)
    received = _all_to_all(send, list(split_sizes), [tokens] * world_size, group)
    return list(received.split([shard.shape[2] for shard in shards], dim=1))


def _plain_scatter_seqlen(
    tensors: Sequence[torch.Tensor], split_sizes: Sequence[int], group: dist.ProcessGroup
) -> list[torch.Tensor]:
    (tensor,) = tensors
    tokens, world_size = split_sizes[group.rank()], group.size()
    received = _all_to_all(tensor, [tokens] * world_size, list(split_sizes), group)
    shards = received.unflatten(0, (world_size, tokens))
    return [shards.permute(1, 0, 2, 3).flatten(1, 2)]


def _all_to_all(
    send: torch.Tensor, output_rows: list[int], input_rows: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    if torch.is_grad_enabled() and send.requires_grad:
        return functional.all_to_all_single_autograd(send, output_rows, input_rows, group)
    received = send.new_empty((sum(output_rows), *send.shape[1:]))
    dist.all_to_all_single(received, send, output_rows, input_rows, group=group)
    return received


class _Hands:
    """Buffers kept by name, and the four exchanges that use them."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, tuple[int, ...], torch.dtype], torch.Tensor] = {}

    def scatter_heads(
        self,
        tensors: Sequence[torch.Tensor],
        split_sizes: Sequence[int],
        group: dist.ProcessGroup,
        name: str = "qkv",
    ) -> list[torch.Tensor]:
        tokens, world_size = split_sizes[group.rank()], group.size()
        shards = [tensor.unflatten(1, (world_size, -1)) for tensor in tensors]
        counts = [shard.shape[2] for shard in shards]
        row = (sum(counts), tensors[0].shape[2])
        send = self._keep(f"send {name}", (world_size, tokens, *row), tensors[0])
        for view, shard in zip(send.transpose(0, 1).split(counts, dim=2), shards, strict=True):
            view.copy_(shard)
        received = self._keep(f"received {name}", (sum(split_sizes), *row), tensors[0])
        dist.all_to_all_single(
            received, send.flatten(0, 1), list(split_sizes), [tokens] * world_size, group=group
        )
        return list(received.split(counts, dim=1))

    def scatter_seqlen(
        self,
        tensors: Sequence[torch.Tensor],
        split_sizes: Sequence[int],
        group: dist.ProcessGroup,
        name: str = "output",
    ) -> list[torch.Tensor]:
        (tensor,) = tensors
        tokens, world_size = split_sizes[group.rank()], group.size()
        received = self._keep(f"received {name}", (world_size, tokens, *tensor.shape[1:]), tensor)
        dist.all_to_all_single(
            received.flatten(0, 1), tensor, [tokens] * world_size, list(split_sizes), group=group
        )
        return [received.transpose(0, 1)]

    @torch.no_grad()
    def scatter_heads_and_back(
        self,
        tensors: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        split_sizes: Sequence[int],
        group: dist.ProcessGroup,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        results = self.scatter_heads(tensors, split_sizes, group)
        back = []
        for index, (tensor, gradient) in enumerate(zip(tensors, gradients, strict=True)):
            (shards,) = self.scatter_seqlen([gradient], split_sizes, group, f"gradient {index}")
            flat = self._keep(f"gradient {index}", tuple(tensor.shape), tensor)
            flat.view(shards.shape).copy_(shards)
            back.append(flat)
        return results, back

    @torch.no_grad()
    def scatter_seqlen_and_back(
        self,
        tensors: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        split_sizes: Sequence[int],
        group: dist.ProcessGroup,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        results = self.scatter_seqlen(tensors, split_sizes, group)
        flat = [gradient.flatten(1, 2) for gradient in gradients]
        return results, self.scatter_heads(flat, split_sizes, group, "gradient")

    def _keep(self, name: str, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        key = (name, shape, like.dtype)
        if key not in self._kept:
            self._kept[key] = torch.empty(shape, dtype=like.dtype)
        return self._kept[key]
