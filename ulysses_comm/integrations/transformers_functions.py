"""What transformers calls of ours, and what of its own we call in between."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Request:
    """The sequence that is being worked on.

    Attributes:
        split_sizes: Tokens each rank owns, in rank order.
        position_ids: (batch or 1, seqlen), of the whole sequence.
        attention_mask: (batch, seqlen) bool, which tokens are no padding; None if all are.
        segments: (batch or 1, seqlen), number of the packed sequence that a token belongs to; None
            if there is one only.
    """

    split_sizes: tuple[int, ...]
    position_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    segments: torch.Tensor | None

    @property
    def seqlen(self) -> int:
        """Tokens of the whole sequence."""
        return sum(self.split_sizes)


def make_mask(attention: str, request: Request, **kwargs: Any) -> Any:
    """Make the mask of the whole sequence, as an attention implementation wants it.

    Args:
        attention: Name of the implementation.
        request: The sequence.
        kwargs: What transformers passes to mask functions, for the rank's tokens.

    Raises:
        ValueError: If the mask is for tokens in a cache.
    """
    from transformers import masking_utils

    make = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS[attention]
    if kwargs.get("q_offset", 0) != 0 or kwargs.get("kv_offset", 0) != 0:
        raise ValueError("A mask for cached tokens is asked for: pass use_cache=False.")
    kwargs.update(
        q_length=request.seqlen, kv_length=request.seqlen, attention_mask=request.attention_mask
    )
    if request.segments is not None:
        apart = masking_utils.packed_sequence_mask_function(request.segments)
        kwargs["mask_function"] = masking_utils.and_masks(kwargs["mask_function"], apart)
        kwargs["allow_is_causal_skip"] = kwargs["allow_is_bidirectional_skip"] = False
    return make(**kwargs)


class ShardedLayer:
    """An attention layer as its function sees it: fewer heads, all else as it is."""

    def __init__(self, module: torch.nn.Module, own: Mapping[str, Any]) -> None:
        self._module = module
        self._own = own

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__["_own"]
        return own[name] if name in own else getattr(self.__dict__["_module"], name)


def attention_function(name: str, module: torch.nn.Module) -> Callable[..., Any]:
    """Return the attention that transformers would use for a layer."""
    from transformers import AttentionInterface

    registered: Any = AttentionInterface._global_mapping.get(name)
    if registered is not None:
        return registered  # type: ignore[no-any-return]
    for cls in type(module).__mro__ if name == "eager" else ():
        eager = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if eager is not None:
            own: Callable[..., Any] = eager
            return own
    raise ValueError(
        f"attention={name!r}: expected a registered implementation, one of "
        f"{sorted(AttentionInterface._global_mapping)}"
        + (f", or a module of {type(module).__name__} that has an eager one." if name == "eager"
           else ", or 'eager'.")
    )  # fmt: skip


def segments_of(position_ids: torch.Tensor) -> torch.Tensor | None:
    """Number the sequences that are packed into one; None if there is one only."""
    flat = position_ids if position_ids.dim() == 2 else position_ids[0]
    begins = flat.diff(dim=-1, prepend=flat[:, :1] - 1) != 1
    segments = begins.cumsum(-1)
    return segments if bool(begins.any()) else None
