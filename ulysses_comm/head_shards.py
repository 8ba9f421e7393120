"""Head shards: Q, K and V as views of one send buffer, so that the exchange need not copy them.

A send buffer is one contiguous (world_size, tokens, heads, head_dim) tensor, destination rank
first; `heads` are the heads per rank of every input, one input after another. Input i seen as head
shards is the view (tokens, world_size, num_heads_local, head_dim) of it: slice [:, r] is the shard
that rank r owns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from ulysses_comm.autograd import PackHeadShards
from ulysses_comm.collective import is_tracked
from ulysses_comm.copies import copy_head_shards
from ulysses_comm.layout import (
    as_head_shards,
    check_heads_divide,
    check_same_head_dim,
    check_tensors,
    promoted_dtype,
    violated,
    whole_number,
)
from ulysses_comm.memory import empty_buffer
from ulysses_comm.tiling import head_shards_buffer
from ulysses_comm.transfer import flattens_as_view


def pack_head_shards(tensors: Sequence[torch.Tensor], world_size: int) -> list[torch.Tensor]:
    """Copy the inputs into a fresh send buffer and return them as its head shards.

    Args:
        tensors: Each (tokens, world_size * num_heads_local, head_dim), any strides; head counts may
            differ, dtypes are promoted.
        world_size: Ranks that the heads will be spread over.

    Returns:
        One (tokens, world_size, num_heads_local, head_dim) view for each input, which together tile
        the buffer: `scatter_heads_gather_seqlen` sends it in place. Tracked inputs give tracked
        views, which it knows for its own.

    Raises:
        ValueError: If an input is not 3-D, has other tokens or another head_dim than the first, or
            heads that world_size does not divide.

    One copy of each input. Under `torch.compile` the pack is one concatenation, which the compiler
    fuses into what produces the inputs, so that they are stored in send order to begin with.
    """
    tensors, world_size = check_tensors(tensors), _check_world_size(world_size)
    if not tensors:
        return []
    for index, tensor in enumerate(tensors):
        _check_packable(f"tensors[{index}]", tensor, tensors[0], world_size)
    check_same_head_dim(tensors)
    shards = [as_head_shards(tensor, world_size) for tensor in tensors]
    if torch.compiler.is_compiling():
        # contiguous() is free but for shapes whose strides torch.cat takes for channels-last.
        send = torch.cat([shard.transpose(0, 1) for shard in shards], dim=2).contiguous()
        return _split_send_buffer(send, [shard.shape[2] for shard in shards])
    dtype = promoted_dtype(tensors)
    if is_tracked(tensors):
        views = PackHeadShards.apply(lambda: _pack(shards, dtype), *tensors)  # type: ignore[no-untyped-call]
        return list(views)
    return _pack(shards, dtype)


def empty_head_shards(
    local_tokens: int,
    world_size: int,
    head_counts: Sequence[int],
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str | None = None,
) -> list[torch.Tensor]:
    """Return the head shards of a fresh, unwritten send buffer, for producers that write in place.

    Args:
        local_tokens: Tokens of this rank.
        world_size: Ranks that the heads will be spread over.
        head_counts: Heads per rank of each view.
        head_dim: Channels of a head.
        dtype: Of the buffer.
        device: Of the buffer; None is torch's default.

    Returns:
        One (local_tokens, world_size, head_counts[i], head_dim) view for each head count.

    Raises:
        ValueError: If a count is out of range.
    """
    world_size = _check_world_size(world_size)
    if not isinstance(head_counts, Iterable):
        raise ValueError(f"head_counts={head_counts!r}: expected a sequence, one for each view.")
    head_counts = [whole_number("head_counts", count) for count in head_counts]
    local_tokens = whole_number("local_tokens", local_tokens)
    head_dim = whole_number("head_dim", head_dim)
    if local_tokens < 0 or head_dim < 1 or any(count < 1 for count in head_counts):
        raise ValueError(
            f"local_tokens={local_tokens}, head_counts={list(head_counts)}, head_dim={head_dim}: "
            "expected zero tokens or more, and at least one head and one channel."
        )
    if not head_counts:
        return []
    shape = (world_size, local_tokens, sum(head_counts), head_dim)
    return _split_send_buffer(empty_buffer(shape, dtype, device), head_counts)


def as_send_buffer(views: Sequence[torch.Tensor], world_size: int) -> torch.Tensor | None:
    """Return the send buffer that the views tile, or None if they do not tile one.

    Args:
        views: Candidates, in the order in which they are to be sent.
        world_size: Ranks of the group they would be sent in.

    Returns:
        The (world_size, tokens, heads, head_dim) buffer, the very memory of the views; None for
        anything that has to be copied: views of several tensors, in another order, for another
        world size, with gaps, of a part of a larger storage, of different dtypes, or tracked by
        autograd, which a send in place would be hidden from.

    No copy, no side effect.
    """
    if isinstance(views, torch.Tensor):
        raise ValueError(
            f"views is one tensor of shape {tuple(views.shape)}: expected a list of head shards."
        )
    views = list(views)
    if not views or torch.compiler.is_compiling():
        return None
    if not all(isinstance(view, torch.Tensor) and view.layout == torch.strided for view in views):
        return None
    if is_tracked(views):
        return None
    return head_shards_buffer(views, world_size)


def flatten_head_shards(view: torch.Tensor) -> torch.Tensor:
    """Return head shards (tokens, world_size, heads, head_dim) as (tokens, world_size * heads, ·).

    A view where the strides allow one, else one copy.

    Raises:
        ValueError: If the view is not 4-D.
    """
    if not isinstance(view, torch.Tensor) or view.dim() != 4:
        given = tuple(view.shape) if isinstance(view, torch.Tensor) else type(view).__name__
        raise ValueError(
            f"view is {given}: expected head shards of 4 dimensions (tokens, world_size, heads per "
            "rank, head_dim)."
        )
    tokens, world_size, heads, head_dim = view.shape
    if torch.compiler.is_compiling() or is_tracked([view]) or flattens_as_view(view):
        return view.flatten(1, 2)
    flat = view.new_empty((tokens, world_size * heads, head_dim))
    copy_head_shards([flat.unflatten(1, (world_size, heads))], [view])
    return flat


def pin_head_layout(
    tensor: torch.Tensor, num_heads: int, head_dim: int, shard_count: int | None = None
) -> None:
    """Tell a compile with dynamic shapes that only the token count of `tensor` varies.

    Without this the compiler carries heads and head_dim as symbols, and every address is split by
    64-bit divisions. Under static compile and in eager mode it only checks the shape.

    Args:
        tensor: (tokens, num_heads, head_dim), or head shards (tokens, shards, heads per rank,
            head_dim) of num_heads heads in all.
        num_heads: Heads between the first and the last dimension.
        head_dim: Channels of a head.
        shard_count: The shard count to specialise on. Head shards of any other count are left with
            their two head dimensions symbolic, and still compile.

    Raises:
        ValueError: If shard_count does not divide num_heads, or the shape contradicts num_heads or
            head_dim; under `torch.compile` the latter is torch's RuntimeError.
    """
    if tensor.dim() < 2:
        raise ValueError(
            f"tensor has shape {tuple(tensor.shape)}: expected (tokens, ..., {head_dim})."
        )
    if shard_count is not None and (shard_count < 1 or num_heads % shard_count):
        raise ValueError(
            f"num_heads={num_heads} does not split into shard_count={shard_count} shards: expected "
            f"a multiple of {shard_count}."
        )
    fits_head_dim = tensor.shape[-1] == head_dim
    fits_num_heads = math.prod(tensor.shape[1:-1]) == num_heads
    if not torch.compiler.is_compiling():
        if not (fits_head_dim and fits_num_heads):
            raise ValueError(
                f"tensor has shape {tuple(tensor.shape)}: expected (tokens, ..., {head_dim}) with "
                f"num_heads={num_heads} heads between the first and the last dimension."
            )
        return
    # Without messages: torch 2.11 does not trace a message, and 2.13 only one without a closure.
    torch._check(fits_head_dim)
    torch._check(fits_num_heads)
    if shard_count is not None and tensor.dim() == 4 and tensor.shape[1] == shard_count:
        torch._check(tensor.shape[2] == num_heads // shard_count)


def _check_world_size(world_size: int) -> int:
    world_size = whole_number("world_size", world_size)
    if world_size < 1:
        raise ValueError(f"world_size={world_size}: expected one rank or more.")
    return world_size


def _split_send_buffer(buffer: torch.Tensor, head_counts: Sequence[int]) -> list[torch.Tensor]:
    return list(buffer.transpose(0, 1).split(list(head_counts), dim=2))


def _pack(shards: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    tokens, world_size, _, head_dim = shards[0].shape
    head_counts = [shard.shape[2] for shard in shards]
    views = empty_head_shards(tokens, world_size, head_counts, head_dim, dtype, shards[0].device)
    copy_head_shards(views, [shard.detach() for shard in shards])
    return views


def _check_packable(name: str, tensor: torch.Tensor, first: torch.Tensor, world_size: int) -> None:
    if tensor.dim() != 3:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}: expected 3 dimensions (tokens of this rank, "
            "heads, head_dim)."
        )
    if violated(tensor.shape[0] == first.shape[0]) or tensor.device != first.device:
        raise ValueError(
            f"{name} has {tensor.shape[0]} tokens on {tensor.device}, tensors[0] has "
            f"{first.shape[0]} on {first.device}: expected the same tokens on the same device."
        )
    check_heads_divide(f"{name} of shape {tuple(tensor.shape)}", tensor.shape[1], world_size)
