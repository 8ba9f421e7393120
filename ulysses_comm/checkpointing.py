"""Activation checkpointing inside a compiled region: recompute everything but the exchanges."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)


def is_exchange(operator: Any) -> bool:
    """Whether a selective checkpointing policy has to save what an operator returns.

    Args:
        operator: What torch passes to a policy, `torch.ops.…`.
    """
    return getattr(operator, "namespace", None) == "ulysses_comm"


def keep_exchanged() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Pass as `context_fn` to `torch.utils.checkpoint.checkpoint` inside a compiled region.

    What an exchange brought is saved and everything else recomputed, so that backward repeats no
    collective. torch.compile of 2.11 to 2.13 cannot repeat an operator that has to take place in
    order, and raises an AssertionError about saved tensors where a checkpoint asks for it. A policy
    of your own returns MUST_SAVE where `is_exchange` says so. Eager mode needs none of this, and
    repeats the exchanges whatever the policy.
    """
    contexts: tuple[AbstractContextManager[Any], AbstractContextManager[Any]] = (
        create_selective_checkpoint_contexts(_policy)
    )
    return contexts


def _policy(
    _: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    if is_exchange(operator):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
