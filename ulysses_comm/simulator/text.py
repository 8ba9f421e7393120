"""How reports write ranks, bytes and dtypes."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def ranges(ranks: Sequence[int]) -> str:
    """Write ranks shortly: 0-3, 6."""
    parts: list[str] = []
    start = 0
    for i in range(1, len(ranks) + 1):
        if i == len(ranks) or ranks[i] != ranks[i - 1] + 1:
            first, last = ranks[start], ranks[i - 1]
            parts.append(str(first) if first == last else f"{first}-{last}")
            start = i
    return ", ".join(parts) if parts else "none"


def format_bytes(nbytes: float) -> str:
    """Write a number of bytes with up to three digits and a binary unit."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.{_digits(value) if unit != 'B' else 0}f} {unit}"
        value /= 1024
    return f"{value:.{_digits(value)}f} TiB"


def _digits(value: float) -> int:
    return 0 if value >= 100 else 1 if value >= 10 else 2


def dtype_name(dtype: torch.dtype) -> str:
    """Write a dtype without the module."""
    return str(dtype).removeprefix("torch.")


def describe(tensor: torch.Tensor) -> str:
    """Write shape, dtype and device of a tensor."""
    return f"{tuple(tensor.shape)} {dtype_name(tensor.dtype)} on {tensor.device}"
