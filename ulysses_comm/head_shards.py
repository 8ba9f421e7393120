"""Head shards: Q, K and V as views of one send buffer, so that the exchange need not copy them.

A send buffer is one contiguous (world_size, tokens, heads, head_dim) tensor, destination rank
first; `heads` are the heads per rank of every input, one input after another. Input i seen as head
shards is the view (tokens, world_size, num_heads_local, head_dim) of it: slice [:, r] is the shard
that rank r owns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ulysses_comm.collective import is_tracked
from ulysses_comm.copies import copy_head_shards
from ulysses_comm.layout import (
    as_head_shards,
    check_heads_divide,
    check_same_head_dim,
    check_tensors,
    promoted_dtype,
)


def pack_head_shards(tensors: Sequence[torch.Tensor], world_size: int) -> list[torch.Tensor]:
    """Copy the inputs into a fresh send buffer and return them as its head shards.

    Args:
        tensors: Each (tokens, world_size * num_heads_local, head_dim), any strides; head counts may
            differ, dtypes are promoted.
        world_size: Ranks that the heads will be spread over.

    Returns:
        One (tokens, world_size, num_heads_local, head_dim) view for each input, which together tile
        the buffer: `scatter_heads_gather_seqlen` sends it in place. Tracked inputs give tracked
        views, which it copies once more.

    Raises:
        ValueError: If an input is not 3-D, has other tokens or another head_dim than the first, or
            heads that world_size does not divide.

    One copy of each input. Under `torch.compile` the pack is one concatenation, which the compiler
    fuses into what produces the inputs, so that they are stored in send order to begin with.
    """
    tensors = check_tensors(tensors)
    if not tensors:
        return []
    for index, tensor in enumerate(tensors):
        _check_packable(f"tensors[{index}]", tensor, tensors[0], world_size)
    check_same_head_dim(tensors)
    shards = [as_head_shards(tensor, world_size) for tensor in tensors]
    if is_tracked(tensors) or torch.compiler.is_compiling():
        return split_send_buffer(concatenate_head_shards(shards), [s.shape[2] for s in shards])
    views = empty_head_shards(
        tensors[0].shape[0],
        world_size,
        [shard.shape[2] for shard in shards],
        tensors[0].shape[2],
        promoted_dtype(tensors),
        tensors[0].device,
    )
    copy_head_shards(views, shards)
    return views


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
    if world_size < 1:
        raise ValueError(f"world_size={world_size}: expected one rank or more.")
    if local_tokens < 0 or head_dim < 1 or any(count < 1 for count in head_counts):
        raise ValueError(
            f"local_tokens={local_tokens}, head_counts={list(head_counts)}, head_dim={head_dim}: "
            "expected zero tokens or more, and at least one head and one channel."
        )
    if not head_counts:
        return []
    shape = (world_size, local_tokens, sum(head_counts), head_dim)
    return split_send_buffer(torch.empty(shape, dtype=dtype, device=device), head_counts)


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
    if not views or torch.compiler.is_compiling() or is_tracked(views):
        return None
    first = views[0]
    if any(view.dim() != 4 or view.shape[1] != world_size for view in views):
        return None
    tokens, _, _, head_dim = first.shape
    heads = sum(view.shape[2] for view in views)
    strides = (heads * head_dim, tokens * heads * head_dim, head_dim, 1)
    storage = first.untyped_storage()
    if storage.nbytes() != world_size * tokens * heads * head_dim * first.element_size():
        return None
    offset = 0
    for view in views:
        tiles = (
            view.dtype == first.dtype
            and view.shape[0] == tokens
            and view.shape[3] == head_dim
            and view.untyped_storage()._cdata == storage._cdata
            and view.storage_offset() == offset
            and _has_strides(view, strides)
            and not (view.is_conj() or view.is_neg())
        )
        if not tiles:
            return None
        offset += view.shape[2] * head_dim
    return first.as_strided(
        (world_size, tokens, heads, head_dim),
        (tokens * heads * head_dim, heads * head_dim, head_dim, 1),
        0,
    )


def flatten_head_shards(view: torch.Tensor) -> torch.Tensor:
    """Return head shards (tokens, world_size, heads, head_dim) as (tokens, world_size * heads, ·).

    A view where the strides allow one, else one copy.

    Raises:
        ValueError: If the view is not 4-D.
    """
    if view.dim() != 4:
        raise ValueError(
            f"view has shape {tuple(view.shape)}: expected head shards of 4 dimensions (tokens, "
            "world_size, heads per rank, head_dim)."
        )
    tokens, world_size, heads, head_dim = view.shape
    if torch.compiler.is_compiling() or is_tracked([view]) or _flattens_as_view(view):
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
        ValueError: If shard_count does not divide num_heads.
        RuntimeError: If the shape contradicts num_heads or head_dim.
    """
    if shard_count is not None and num_heads % shard_count:
        raise ValueError(
            f"num_heads={num_heads} does not split into shard_count={shard_count} shards: expected "
            f"a multiple of {shard_count}."
        )
    torch._check(tensor.shape[-1] == head_dim, lambda: _misfit(tensor, num_heads, head_dim))
    torch._check(
        math.prod(tensor.shape[1:-1]) == num_heads, lambda: _misfit(tensor, num_heads, head_dim)
    )
    if shard_count is not None and tensor.dim() == 4 and tensor.shape[1] == shard_count:
        torch._check(tensor.shape[2] == num_heads // shard_count)


def split_send_buffer(buffer: torch.Tensor, head_counts: Sequence[int]) -> list[torch.Tensor]:
    """Return the head shards of a send buffer (world_size, tokens, heads, head_dim), as views."""
    return list(buffer.transpose(0, 1).split(list(head_counts), dim=2))


def concatenate_head_shards(shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a send buffer with the shards' contents, in a form that autograd and compilers follow.

    Args:
        shards: Each (tokens, world_size, num_heads_local, head_dim).

    Returns:
        (world_size, tokens, sum of num_heads_local, head_dim), contiguous, in the promoted dtype.
    """
    # contiguous() is free but for shapes whose strides torch.cat takes for channels-last.
    return torch.cat([shard.transpose(0, 1) for shard in shards], dim=2).contiguous()


def _check_packable(name: str, tensor: torch.Tensor, first: torch.Tensor, world_size: int) -> None:
    if tensor.dim() != 3:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}: expected 3 dimensions (tokens of this rank, "
            "heads, head_dim)."
        )
    if tensor.shape[0] != first.shape[0] or tensor.device != first.device:
        raise ValueError(
            f"{name} has {tensor.shape[0]} tokens on {tensor.device}, tensors[0] has "
            f"{first.shape[0]} on {first.device}: expected the same tokens on the same device."
        )
    if world_size < 1:
        raise ValueError(f"world_size={world_size}: expected one rank or more.")
    check_heads_divide(f"{name} of shape {tuple(tensor.shape)}", tensor.shape[1], world_size)


def _has_strides(view: torch.Tensor, strides: tuple[int, int, int, int]) -> bool:
    """Compare the strides that address something: of axes longer than one, in a filled tensor."""
    return view.numel() == 0 or all(
        size <= 1 or stride == expected
        for size, stride, expected in zip(view.shape, view.stride(), strides, strict=True)
    )


def _flattens_as_view(view: torch.Tensor) -> bool:
    return (
        view.numel() == 0
        or view.shape[1] == 1
        or view.shape[2] == 1
        or view.stride(1) == view.shape[2] * view.stride(2)
    )


def _misfit(tensor: torch.Tensor, num_heads: int, head_dim: int) -> str:
    return (
        f"tensor has shape {tuple(tensor.shape)}: expected (tokens, ..., {head_dim}) with "
        f"num_heads={num_heads} heads between the first and the last dimension."
    )
