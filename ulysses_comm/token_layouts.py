"""The layouts that attention functions take, seen as (batch, tokens, heads, head_dim), and back.

The exchanges move (tokens, heads, channels), one sequence at a time. A batch is as many inputs of
one exchange; where they land evenly spaced in one buffer, they are one strided tensor again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch

from ulysses_comm.collective import is_tracked

TokenLayout = Literal["shd", "bshd", "bhsd", "sbhd"]
"""Order of the axes: b batch, s tokens, h heads, d channels of a head."""


def check_layout(layout: str) -> None:
    """Check that a layout is one of ours.

    Raises:
        ValueError: If it is not.
    """
    if layout not in get_args(TokenLayout):
        raise ValueError(
            f"layout={layout!r}: expected one of {', '.join(get_args(TokenLayout))} "
            "(b batch, s tokens, h heads, d channels of a head)."
        )


def as_bshd(tensor: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
    """See a tensor of some layout as (batch, tokens, heads, channels); a view."""
    if layout == "shd":
        return tensor.unsqueeze(0)
    if layout == "bhsd":
        return tensor.transpose(1, 2)
    return tensor.transpose(0, 1) if layout == "sbhd" else tensor


def from_bshd(tensor: torch.Tensor, layout: TokenLayout) -> torch.Tensor:
    """See (batch, tokens, heads, channels) as a layout; a view."""
    if layout == "shd":
        return tensor.squeeze(0)
    if layout == "bhsd":
        return tensor.transpose(1, 2)
    return tensor.transpose(0, 1) if layout == "sbhd" else tensor


def split_batch(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return each sequence of (batch, ...) as a view."""
    if tensor.shape[0] == 1:
        return [tensor.squeeze(0)]
    return list(tensor.unbind(0))


def join_batch(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return sequences of one shape as (batch, ...): a view if they are evenly spaced, else a copy.

    The opposite of `split_batch`.
    """
    if len(parts) == 1:
        return parts[0].unsqueeze(0)
    if torch.compiler.is_compiling() or _spacing(parts) is None:
        return torch.stack(list(parts))
    if is_tracked(parts):
        joined: torch.Tensor = _JoinViews.apply(*parts)  # type: ignore[no-untyped-call]
        return joined
    return _joined(parts)


class _JoinViews(torch.autograd.Function):
    """`torch.stack` that finds its result already in memory."""

    @staticmethod
    def forward(ctx: Any, *parts: torch.Tensor) -> torch.Tensor:
        return _joined([part.detach() for part in parts])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grads[0].unbind(0)


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    first, spacing = parts[0], _spacing(parts)
    assert spacing is not None, "the caller has asked"
    return first.as_strided(
        (len(parts), *first.shape), (spacing, *first.stride()), first.storage_offset()
    )


def _spacing(parts: Sequence[torch.Tensor]) -> int | None:
    """Elements from each part to the next one, or None if they do not lie evenly in one storage."""
    first, second = parts[0], parts[1]
    spacing = int(second.storage_offset()) - int(first.storage_offset())
    for index, part in enumerate(parts):
        if not (
            part.untyped_storage()._cdata == first.untyped_storage()._cdata
            and part.dtype == first.dtype
            and part.shape == first.shape
            and part.stride() == first.stride()
            and part.storage_offset() == first.storage_offset() + index * spacing
        ):
            return None
    return spacing if spacing > 0 else None
