"""Recognising tensors that already lie as the wire wants them, so that no copy is made."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ulysses_comm.wire import Wire


def head_shards_buffer(views: Sequence[torch.Tensor], world_size: int) -> torch.Tensor | None:
    """Return the (world_size, tokens, heads, head_dim) buffer that head shards tile, else None.

    The buffer has to be the whole of its storage. Asks for the geometry alone; whether autograd
    tracks the views is the caller's business.
    """
    if any(view.dim() != 4 or view.shape[1] != world_size for view in views):
        return None
    tokens, _, _, head_dim = views[0].shape
    heads = sum(view.shape[2] for view in views)
    if not _tile(views, (heads * head_dim, tokens * heads * head_dim, head_dim, 1)):
        return None
    size = world_size * tokens * heads * head_dim * views[0].element_size()
    if views[0].storage_offset() != 0 or views[0].untyped_storage().nbytes() != size:
        return None
    return views[0].as_strided(
        (world_size, tokens, heads, head_dim),
        (tokens * heads * head_dim, heads * head_dim, head_dim, 1),
    )


def scattered_buffer_of(inputs: Sequence[torch.Tensor], wire: Wire) -> torch.Tensor | None:
    """Return the send buffer that the inputs of `scatter_heads` tile, or None."""
    if not (wire.is_uniform and wire.is_even) or inputs[0].dtype != wire.dtype:
        return None
    return head_shards_buffer(inputs, wire.world_size)


def gathered_buffer_of(
    inputs: Sequence[torch.Tensor], wire: Wire, rank: int
) -> torch.Tensor | None:
    """Return the buffer (seqlen, heads, head_dim) that the inputs of `scatter_seqlen` lie in."""
    first = inputs[0]
    if not wire.is_uniform or first.dtype != wire.dtype:
        return None
    if len(inputs) == 1 and first.is_contiguous() and not (first.is_conj() or first.is_neg()):
        return first
    heads, head_dim = wire.row_shape(rank)
    if not _tile(inputs, (heads * head_dim, head_dim, 1)):
        return None
    return first.as_strided((first.shape[0], heads, head_dim), (heads * head_dim, head_dim, 1))


def _tile(views: Sequence[torch.Tensor], strides: tuple[int, ...]) -> bool:
    """Whether the views lie side by side on the head axis of one buffer, in the order given."""
    first = views[0]
    storage = first.untyped_storage()._cdata
    offset = first.storage_offset()
    for view in views:
        if not (
            view.dtype == first.dtype
            and view.shape[0] == first.shape[0]
            and view.shape[-1] == first.shape[-1]
            and view.untyped_storage()._cdata == storage
            and view.storage_offset() == offset
            and _has_strides(view, strides)
            and not (view.is_conj() or view.is_neg())
        ):
            return False
        offset += view.shape[-2] * view.shape[-1]
    return True


def _has_strides(view: torch.Tensor, strides: tuple[int, ...]) -> bool:
    """Compare the strides that address something: of axes longer than one, in a filled tensor."""
    # Nearly always all of them are equal, which is cheap to see.
    return (
        view.stride() == strides
        or view.numel() == 0
        or all(
            size <= 1 or stride == expected
            for size, stride, expected in zip(view.shape, view.stride(), strides, strict=True)
        )
    )
