"""Whose exchange it is, and where it finds memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ulysses_comm.memory import is_large
from ulysses_comm.workspace import Workspace, spare_buffers


@dataclass(frozen=True)
class Route:
    """Who exchanges what with whom.

    Attributes:
        group: The ranks.
        rank: This rank.
        split_sizes: Tokens each rank owns, in rank order.
    """

    group: dist.ProcessGroup
    rank: int
    split_sizes: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens of this rank."""
        return self.split_sizes[self.rank]

    @property
    def seqlen(self) -> int:
        """Tokens of the whole sequence."""
        return sum(self.split_sizes)


@dataclass(frozen=True)
class Buffers:
    """Where an exchange finds memory.

    Attributes:
        workspace: The caller's, which keeps buffers between calls; None if there is none.
        receive: The caller's own receive buffer, of the right size.
        results: The caller's own tensor for each flattened result, of any strides.
    """

    workspace: Workspace | None = None
    receive: torch.Tensor | None = None
    results: Sequence[torch.Tensor] | None = None

    def take(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> torch.Tensor:
        """Return an unwritten buffer; the group of the exchange may have a spare one."""
        if self.workspace is not None:
            return self.workspace.take(shape, dtype, device)
        if group is not None and is_large(shape, dtype, device):
            return spare_buffers(group).take(shape, dtype, device)
        return torch.empty(tuple(shape), dtype=dtype, device=device)

    def take_receive(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        """Return the caller's receive buffer, or an unwritten one."""
        if self.receive is None:
            return self.take(shape, dtype, device, group)
        return self.receive.view(tuple(shape))
