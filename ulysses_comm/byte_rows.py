"""Inputs of several dtypes or head dims as rows of bytes, for one collective to carry."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ByteRows:
    """Where each input lies in a row of bytes.

    Attributes:
        dtypes: Of each input.
        shapes: (num_heads_local, head_dim) of each input.
        offsets: First byte of each input, a multiple of its element size.
        row_bytes: Length of a row, a multiple of every element size.
    """

    dtypes: list[torch.dtype]
    shapes: list[tuple[int, int]]
    offsets: list[int]
    row_bytes: int

    @classmethod
    def plan(cls, dtypes: Sequence[torch.dtype], shapes: Sequence[tuple[int, int]]) -> ByteRows:
        """Lay the inputs one after another, each aligned to its own element size."""
        offsets, end = [], 0
        for dtype, shape in zip(dtypes, shapes, strict=True):
            offsets.append(_round_up(end, dtype.itemsize))
            end = offsets[-1] + math.prod(shape) * dtype.itemsize
        row_bytes = _round_up(end, max(dtype.itemsize for dtype in dtypes))
        return cls(list(dtypes), list(shapes), offsets, row_bytes)

    def empty(self, *leading: int, device: torch.device) -> torch.Tensor:
        """Return rows (*leading, row_bytes) of uint8, unwritten but for gaps, which are zero."""
        rows = torch.empty(*leading, self.row_bytes, dtype=torch.uint8, device=device)
        end = 0
        for start, stop in zip(
            [*self.offsets, self.row_bytes], [*self._ends(), self.row_bytes], strict=True
        ):
            if start > end:
                rows[..., end:start].zero_()
            end = stop
        return rows

    def views(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Return each input's part of the rows as (..., num_heads_local, head_dim) of its dtype."""
        return [
            rows[..., start:stop].view(dtype).unflatten(-1, shape)
            for start, stop, dtype, shape in zip(
                self.offsets, self._ends(), self.dtypes, self.shapes, strict=True
            )
        ]

    def _ends(self) -> list[int]:
        return [
            offset + math.prod(shape) * dtype.itemsize
            for offset, shape, dtype in zip(self.offsets, self.shapes, self.dtypes, strict=True)
        ]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
