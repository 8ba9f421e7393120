"""Slicing what belongs to single heads (masks, biases, sinks, slopes) to the heads of one rank.

An attention function sees only some heads of the model, so an argument with a value for each head
has to be cut. Which arguments those are is declared by name, never guessed from a shape: a sequence
may be as long as there are heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch

from ulysses_comm.head_plan import HeadPlan, LocalHeads


@dataclass(frozen=True)
class PerHead:
    """An argument that is a tensor with an axis of heads.

    A tensor of one element on that axis serves all heads and stays as it is, and so does one that
    has too few dimensions to have the axis.

    Attributes:
        axis: The axis, as a rule counted from the end.
        of: Which heads the axis counts.
    """

    axis: int
    of: Literal["query", "key_value"] = "query"


@dataclass(frozen=True)
class HeadIndex:
    """An argument that is a function of a query head's number, such as flex attention's score_mod.

    Attributes:
        position: Place of the head's number among the function's positional arguments.
    """

    position: int


Rule = PerHead | HeadIndex

PER_HEAD_ARGUMENTS: Mapping[str, Rule] = MappingProxyType(
    {
        # Masks and biases end in (heads or 1, queries, keys).
        "attn_mask": PerHead(-3),
        "attention_mask": PerHead(-3),
        "attn_bias": PerHead(-3),
        "position_bias": PerHead(-3),
        # One number for each head, flash-attention's names and others'.
        "alibi_slopes": PerHead(-1),
        "sinks": PerHead(-1),
        "s_aux": PerHead(-1),
        "learnable_sink": PerHead(-1),
        # Flex attention: score_mod(score, batch, head, query, key), mask_mod(batch, head, ...).
        "score_mod": HeadIndex(2),
        "mask_mod": HeadIndex(1),
    }
)
"""What `UlyssesAttention` slices unless it is told otherwise."""


def slice_arguments(
    arguments: Mapping[str, Any], rules: Mapping[str, Rule], plan: HeadPlan, local: LocalHeads
) -> dict[str, Any]:
    """Return keyword arguments for the heads of one rank; what has no rule passes as it is.

    Args:
        arguments: The caller's, for all heads.
        rules: By name.
        plan: The heads of the model.
        local: The heads that the rank attends with.

    Raises:
        ValueError: If an argument does not fit its rule.
    """
    return {
        name: _slice(name, value, rules[name], plan, local) if name in rules else value
        for name, value in arguments.items()
    }


def _slice(name: str, value: Any, rule: Rule, plan: HeadPlan, local: LocalHeads) -> Any:
    if value is None:
        return None
    if isinstance(rule, HeadIndex):
        return _shifted(name, value, rule.position, local.query[0])
    if not isinstance(value, torch.Tensor):
        return _with_one_head(name, value)
    axis = rule.axis if rule.axis < 0 else rule.axis - value.dim()
    if value.dim() < -axis or axis >= 0:
        return value
    size, expected = value.shape[axis], plan.num_heads
    if rule.of == "key_value":
        expected = plan.num_kv_heads
    if size == 1 and expected != 1:
        return value
    if size != expected:
        raise ValueError(
            f"{name} of shape {tuple(value.shape)} has {size} on axis {rule.axis}: expected "
            f"{expected}, one for each {rule.of} head of the model, or 1 for all. Pass it for all "
            f"heads, or declare another axis with per_head={{{name!r}: PerHead(axis)}}."
        )
    if rule.of == "query":
        return value.narrow(axis, local.query[0], local.num_query)
    start, stop = local.key_value
    own = value.narrow(axis, start, stop - start)
    if local.index is None:
        return own
    # Keys and values come expanded to the query heads then, and so does this.
    return own.index_select(axis, torch.tensor(local.index, device=value.device))


def _shifted(
    name: str, function: Callable[..., Any], position: int, first_head: int
) -> Callable[..., Any]:
    if not callable(function):
        raise ValueError(
            f"{name} is a {type(function).__name__}: expected a function, by its rule in per_head."
        )
    if first_head == 0:
        return function

    def of_all_heads(*args: Any) -> Any:
        head = args[position] + first_head
        return function(*args[:position], head, *args[position + 1 :])

    return of_all_heads


def _with_one_head(name: str, value: Any) -> Any:
    """Let objects like flex attention's BlockMask pass if they hold for every head."""
    shape = getattr(value, "shape", None)
    if shape is None or len(shape) < 3 or shape[-3] == 1:
        return value
    raise ValueError(
        f"{name} is a {type(value).__name__} of shape {tuple(shape)}, which cannot be cut by "
        "heads: expected one that holds for all heads (1 on its axis of heads), or a tensor."
    )
