"""A real process group that notes what it is handed: the proof of what real ranks sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ulysses_comm.demo.attention import digest


@dataclass(kw_only=True)
class RankSent:
    """What one rank handed to its all-to-alls, in call order.

    Attributes:
        bytes: bytes[exchange][destination], its share to itself included.
        copied: Payload bytes that the package copied outside each collective.
        digests: Of each send buffer.
        addresses: Where each send buffer started.
    """

    bytes: list[list[int]] = field(default_factory=list)
    copied: list[int] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)


class RecordingGroup(dist.ProcessGroup):
    """Passes the two collectives of the demo on to another group, and notes every all-to-all.

    Attributes:
        record: What was sent so far.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]  # stub lacks it
        self.record = RankSent()
        self._group = group
        self._copied_before = 0

    def rank(self) -> int:
        """Rank of this process in the group."""
        return self._group.rank()

    def size(self) -> int:
        """Ranks of the group."""
        return self._group.size()

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        """Name of the backend that does the work."""
        return self._group.name()

    def record_copied_bytes(self, nbytes: int, *, after: bool) -> None:
        """Note a copy of the package: before the next all-to-all, or after the last one."""
        if after:
            self.record.copied[-1] += nbytes
        else:
            self._copied_before += nbytes

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        """Note what is sent, and let the group send it."""
        row_bytes = input[0].nbytes if len(input) else 0
        self.record.bytes.append([rows * row_bytes for rows in input_split_sizes])
        self.record.copied.append(self._copied_before)
        self.record.digests.append(digest(input))
        self.record.addresses.append(input.data_ptr())
        self._copied_before = 0
        work: dist.Work = dist.all_to_all_single(
            output,
            input,
            list(output_split_sizes),
            list(input_split_sizes),
            group=self._group,
            async_op=True,
        )
        return work

    # What torch before 2.13 calls it.
    alltoall_base = all_to_all_single  # type: ignore[assignment]  # one of its overloads

    def allreduce(  # type: ignore[override]  # one of its overloads
        self, tensors: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Let the group add them up."""
        work: dist.Work = dist.all_reduce(
            tensors[0], op=opts.reduceOp, group=self._group, async_op=True
        )
        return work
