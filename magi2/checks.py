"""What arguments look like in an error, and facts that a caller may state in several ways."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterable
from typing import Any

import torch


def describe(value: object) -> str:
    """Shape and dtype of a tensor; the type of anything else."""
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.dtype}"
    return f"of type {type(value).__name__}"


def whole_numbers(name: str, values: object) -> tuple[int, ...]:
    """Integers on the host, from Python, numpy or torch; a bool is none, and nothing is rounded.

    Raises:
        ValueError: If `values` is no series of integers.
    """
    expected = "expected a series of integers"
    if not isinstance(values, Iterable) or isinstance(values, str | bytes):
        raise ValueError(f"{name} is {describe(values)}: {expected}.")
    items = list(values)
    wrong = [item for item in items if not _is_whole(item)]
    if wrong:
        raise ValueError(f"{name}={items} holds {wrong[0]!r}: {expected}.")
    return tuple(operator.index(item) for item in items)


def is_finite_number(value: object) -> bool:
    """Whether a value is an integer or a float that float arithmetic can hold; a bool is none."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # JSON's integers have no bound
        return False


def parse_json(text: str | bytes) -> Any:
    """Parse JSON in which no object states a key twice, which the standard parser lets pass.

    Raises:
        ValueError: If it is no JSON, a key is stated twice, or it is nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=_unique)
    except RecursionError as error:
        raise ValueError("it is nested too deeply.") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} is stated twice.")
        found[key] = value
    return found


def _is_whole(item: object) -> bool:
    if isinstance(item, bool):
        return False
    if isinstance(item, torch.Tensor) and (item.is_meta or item.dtype == torch.bool):
        return False
    try:
        operator.index(item)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return True
