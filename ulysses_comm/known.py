"""Remembering that a call was checked, so that a steady loop checks each of its calls once.

What a check finds depends on shapes, strides, dtypes and devices, never on what the tensors hold.
So the outcome is kept by these. It is the outcome of a pure function: a rank that remembers and one
that checks anew do the same. Straight after attention, when the caches hold nothing of this
package, the check of q, k and v takes a quarter of a millisecond; the look-up a tenth of that.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Generic, TypeGuard, TypeVar

import torch

from ulysses_comm.head_split import HeadSplit

OutcomeT = TypeVar("OutcomeT")

_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_MOST = 512


class KnownCalls(Generic[OutcomeT]):
    """Outcomes of checks, by what they depend on; forgets all of them when there are too many."""

    def __init__(self) -> None:
        self._outcomes: dict[Hashable, OutcomeT] = {}

    def get(self, key: Hashable | None) -> OutcomeT | None:
        """Return what is known of a call; None for one without a key."""
        return None if key is None else self._outcomes.get(key)

    def remember(self, key: Hashable | None, outcome: OutcomeT) -> None:
        """Keep the outcome of a call that has a key."""
        if key is None:
            return
        if len(self._outcomes) >= _MOST:
            self._outcomes.clear()
        self._outcomes[key] = outcome


def key_of_call(
    tensors: object, split_sizes: object, head_splits: object, *facts: Hashable
) -> Hashable | None:
    """Return all that the check of an exchange depends on; None if that is not plain to see.

    Args:
        tensors: What the caller passed.
        split_sizes: What the caller passed.
        head_splits: What the caller passed.
        *facts: Other things that the outcome depends on.
    """
    if torch.compiler.is_compiling():
        return None
    if not (_is_sequence(tensors) and _is_sequence(split_sizes)):
        return None
    # A bool or a numpy integer equals an int, but is checked differently.
    if set(map(type, split_sizes)) != {int}:
        return None
    if head_splits is not None:
        if not _is_sequence(head_splits) or set(map(type, head_splits)) != {HeadSplit}:
            return None
        head_splits = tuple(head_splits)
    of_tensors = []
    for tensor in tensors:
        if type(tensor) not in _PLAIN_TENSORS or tensor.is_nested:
            return None
        of_tensors.append(
            (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.layout)
        )
    return (tuple(of_tensors), tuple(split_sizes), head_splits, facts)


def _is_sequence(value: object) -> TypeGuard[Sequence[Any]]:
    return type(value) is list or type(value) is tuple
