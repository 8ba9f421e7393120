"""Where packed sequences begin and end, worked out once a request."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch


class PackedSequences:
    """Packed sequences, on the host and on the devices that asked for them.

    Args:
        ends: Ends of the sequences, from 0 to the tokens; empty sequences are legal.
    """

    def __init__(self, ends: Sequence[int]) -> None:
        self.ends = tuple(ends)
        self._on_device: dict[torch.device, torch.Tensor] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return self.ends[-1]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First and last row, exclusive, of every sequence that has any."""
        return [(start, end) for start, end in pairwise(self.ends) if start < end]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max((end - start for start, end in self.spans), default=0)

    def ends_on(self, device: torch.device) -> torch.Tensor:
        """Ends of the sequences that are not empty, from 0, int32; copied there once."""
        if device not in self._on_device:
            ends = [0, *(end for _, end in self.spans)]
            self._on_device[device] = torch.tensor(ends, dtype=torch.int32, device=device)
        return self._on_device[device]
