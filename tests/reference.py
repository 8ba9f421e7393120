"""The plain formulation of both exchanges, which defines what they mean.

Each input is permuted to destination-rank-major, the inputs are concatenated on the head axis, and
the chunks are cut and handed out one by one. Slow, obvious, in one process, without any group.

    W = ranks, S_r = tokens of rank r, S = all tokens, H_i = heads of input i per rank, D = head_dim
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def heads_per_rank(tensor: torch.Tensor, world_size: int) -> int:
    """Return H_i of an input `[S_r, W*H_i, D]` or of head shards `[S_r, W, H_i, D]`."""
    return tensor.shape[2] if tensor.dim() == 4 else tensor.shape[1] // world_size


def scatter_heads_send_buffer(tensors: Sequence[torch.Tensor], world_size: int) -> torch.Tensor:
    """Return `[W, S_r, H, D]`, what one rank sends before attention, in the promoted dtype."""
    permuted = []
    for tensor in tensors:
        heads = heads_per_rank(tensor, world_size)
        shards = tensor.detach().reshape(tensor.shape[0], world_size, heads, tensor.shape[-1])
        permuted.append(shards.permute(1, 0, 2, 3).contiguous())
    return torch.cat(permuted, dim=2)


def scatter_heads_split_sizes(split_sizes: Sequence[int], rank: int) -> tuple[list[int], list[int]]:
    """Return (input, output) split sizes in rows of `[H, D]` of the exchange before attention."""
    return [split_sizes[rank]] * len(split_sizes), list(split_sizes)


def scatter_seqlen_split_sizes(
    split_sizes: Sequence[int], rank: int
) -> tuple[list[int], list[int]]:
    """Return (input, output) split sizes in rows of `[H, D]` of the exchange after attention."""
    return list(split_sizes), [split_sizes[rank]] * len(split_sizes)


def scatter_heads_receive_buffer(sends: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
    """Return `[S, H, D]`: chunk `rank` of every rank's send buffer, source ranks in order."""
    return torch.cat([send[rank] for send in sends], dim=0)


def scatter_heads_results(
    inputs: Sequence[Sequence[torch.Tensor]], rank: int
) -> list[torch.Tensor]:
    """Return what rank `rank` gets before attention: views `[S, H_i, D]` of one `[S, H, D]`.

    Args:
        inputs: For every rank its list of inputs.
        rank: The rank whose results are wanted.
    """
    world_size = len(inputs)
    sends = [scatter_heads_send_buffer(tensors, world_size) for tensors in inputs]
    received = scatter_heads_receive_buffer(sends, rank)
    heads = [heads_per_rank(tensor, world_size) for tensor in inputs[rank]]
    return list(received.split(heads, dim=1))


def scatter_heads_one_by_one(
    inputs: Sequence[Sequence[torch.Tensor]], rank: int
) -> list[torch.Tensor]:
    """Return the same tokens and heads as `scatter_heads_results`, each in its own dtype.

    Formulated from the whole model's tensor: every token, then the heads that this rank owns.
    """
    world_size = len(inputs)
    results = []
    for index, own in enumerate(inputs[rank]):
        heads = heads_per_rank(own, world_size)
        width = world_size * heads
        parts = [tensors[index].detach() for tensors in inputs]
        whole = torch.cat([part.reshape(part.shape[0], width, own.shape[-1]) for part in parts])
        results.append(whole[:, rank * heads : (rank + 1) * heads])
    return results


def scatter_seqlen_receive_buffer(
    inputs: Sequence[torch.Tensor], split_sizes: Sequence[int], rank: int
) -> torch.Tensor:
    """Return `[W, S_r, H, D]`, what rank `rank` receives after attention, source rank first.

    Args:
        inputs: For every rank its attention output, `[S, H, D]`.
        split_sizes: Tokens of every rank.
        rank: The rank whose result is wanted.
    """
    start = sum(split_sizes[:rank])
    return torch.stack([tensor.detach()[start : start + split_sizes[rank]] for tensor in inputs])


def scatter_seqlen_head_shards(
    inputs: Sequence[torch.Tensor], split_sizes: Sequence[int], rank: int
) -> torch.Tensor:
    """Return the view `[S_r, W, H, D]` of that buffer."""
    return scatter_seqlen_receive_buffer(inputs, split_sizes, rank).permute(1, 0, 2, 3)


def scatter_seqlen_heads(
    inputs: Sequence[torch.Tensor], split_sizes: Sequence[int], rank: int
) -> torch.Tensor:
    """Return `[S_r, W*H, D]`, contiguous: for each of its tokens all heads in order."""
    start = sum(split_sizes[:rank])
    own = [tensor.detach()[start : start + split_sizes[rank]] for tensor in inputs]
    return torch.cat(own, dim=1)
