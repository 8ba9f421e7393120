"""Where the ranks of a group meet: the n-th call of every rank on a group is one collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ulysses_comm.simulator.errors import AsyncMisuseError, MismatchError
from ulysses_comm.simulator.scheduler import Scheduler
from ulysses_comm.simulator.traffic import CollectiveRecord, RankCall, SentBuffer, Traffic


class Recorder:
    """Collects the traffic of one simulation."""

    def __init__(self, world_size: int, *, digests: bool) -> None:
        self.traffic = Traffic(world_size)
        self.digests = digests
        self._pending_copies = [0] * world_size
        self._last_calls: list[RankCall | None] = [None] * world_size

    def record_call(
        self, record: CollectiveRecord, rank: int, sends: Sequence[torch.Tensor], async_op: bool
    ) -> RankCall:
        """Book one rank's part in a collective."""
        buffers = tuple(SentBuffer.of(tensor, digest=self.digests) for tensor in sends)
        call = RankCall(rank, buffers, async_op, self._pending_copies[rank])
        self._pending_copies[rank] = 0
        self._last_calls[rank] = call
        record.calls.append(call)
        return call

    def record_copied_bytes(self, rank: int, nbytes: int, *, after: bool) -> None:
        """Book payload bytes copied outside the collective on the next or the last one."""
        last = self._last_calls[rank]
        if after and last is not None:
            last.copied_bytes += nbytes
        else:
            self._pending_copies[rank] += nbytes


@dataclass(slots=True)
class Call:
    """What one rank hands to a collective.

    Attributes:
        rank: Rank within the group.
        facts: What all ranks must agree about, in the order of `Operation.facts`.
        sends: Tensors that are read.
        receives: Tensors that are written.
        targets: Where the operation writes for each of `receives`: the tensor itself, or a stand-in
            if the rank has not called `wait()` yet.
        extra: Further arguments, for the operation.
        async_op: Whether the rank goes on before the collective is done.
    """

    rank: int
    facts: tuple[object, ...]
    sends: list[torch.Tensor]
    receives: list[torch.Tensor]
    extra: Any = None
    async_op: bool = False
    targets: list[torch.Tensor] | None = None
    waiting: bool = False
    send_versions: list[int | None] | None = None
    receive_versions: list[int | None] | None = None


@dataclass(frozen=True)
class Operation:
    """A kind of collective.

    Attributes:
        name: Name of the torch.distributed function.
        facts: Names of what all ranks must agree about.
        check: Raises if the calls, in rank order, contradict each other.
        move: Moves the data from `sends` to `targets`.
        sent: Bytes from each rank to each rank.
    """

    name: str
    facts: tuple[str, ...]
    check: Callable[[Sequence[Call], str, Sequence[int]], None]
    move: Callable[[Sequence[Call]], None]
    sent: Callable[[Sequence[Call]], list[list[int]]]


class Group:
    """What the ranks of one group share.

    Attributes:
        name: The name by which reports call it.
        ranks: Its ranks in the simulated world, in group order.
    """

    def __init__(
        self, scheduler: Scheduler, recorder: Recorder, name: str, ranks: Sequence[int]
    ) -> None:
        self.scheduler = scheduler
        self.recorder = recorder
        self.name = name
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self._next_index = [0] * self.size
        self._meetings: dict[int, Meeting] = {}

    def __str__(self) -> str:
        return f"group {self.name!r} (ranks {_ranges(self.ranks)})"

    def issue(self, operation: Operation, call: Call) -> CollectiveWork:
        """Enter a rank's call; wait for its end unless it is asynchronous."""
        rank = self.ranks[call.rank]
        self.scheduler.require_current(rank)
        self.scheduler.raise_if_failed()
        self.scheduler.note_progress()
        index = self._next_index[call.rank]
        self._next_index[call.rank] = index + 1
        meeting = self._meetings.get(index)
        if meeting is None:
            meeting = self._meetings[index] = Meeting(self, operation, index)
            self.recorder.traffic.append(meeting.record)
        work = CollectiveWork(meeting, call)
        try:
            meeting.arrive(operation, call)
            if len(meeting.calls) == self.size:
                del self._meetings[index]
                meeting.complete()
        except (MismatchError, AsyncMisuseError) as error:
            self.scheduler.fail(error, rank)
            raise
        if not call.async_op:
            work.wait()
        return work


class Meeting:
    """One collective: collects the calls of the ranks and moves the data once all are there."""

    def __init__(self, group: Group, operation: Operation, index: int) -> None:
        self.group = group
        self.operation = operation
        self.index = index
        self.done = False
        self.calls: dict[int, Call] = {}
        self.record = CollectiveRecord(operation.name, group.name, group.ranks, index)

    @property
    def title(self) -> str:
        """Name of the call in reports."""
        return f"{self.operation.name} #{self.index} of {self.group}"

    def describe(self) -> str:
        """Say who has come and who is missing."""
        ranks = self.group.ranks
        arrived = [ranks[rank] for rank in sorted(self.calls)]
        missing = [rank for rank in ranks if rank not in arrived]
        return f"{self.title}; arrived: {_ranges(arrived)}; missing: {_ranges(missing)}"

    def arrive(self, operation: Operation, call: Call) -> None:
        """Add a rank's call, after comparing it with the first one."""
        first = next(iter(self.calls.values()), None)
        if first is not None and (operation is not self.operation or call.facts != first.facts):
            self._raise_mismatch(first, operation, call)
        rank = self.group.ranks[call.rank]
        self.group.recorder.record_call(self.record, rank, call.sends, call.async_op)
        self.calls[call.rank] = call

    def complete(self) -> None:
        """Check the calls against each other and move the data."""
        calls = [self.calls[rank] for rank in range(self.group.size)]
        self.operation.check(calls, self.title, self.group.ranks)
        with torch.inference_mode():
            for call in calls:
                call.targets = [receive.detach() for receive in call.receives]
            self.operation.move(calls)
        self.record.sent = self.operation.sent(calls)
        self.done = True

    def _raise_mismatch(self, first: Call, operation: Operation, call: Call) -> None:
        first_rank, rank = (self.group.ranks[c.rank] for c in (first, call))
        raise MismatchError(
            f"ranks disagree about call #{self.index} of {self.group}: rank {first_rank} called "
            f"{_call_text(self.operation, first)}, rank {rank} called {_call_text(operation, call)}"
        )


class CollectiveWork(dist.Work):
    """The handle of one rank's part in a collective."""

    def __init__(self, meeting: Meeting, call: Call) -> None:
        super().__init__()
        self._meeting = meeting
        self._call = call

    def wait(self, timeout: object = None) -> bool:
        """Return once the collective is done; the timeout never passes, a deadlock is found."""
        group = self._meeting.group
        group.scheduler.block(group.ranks[self._call.rank], self._meeting)
        return True


def _call_text(operation: Operation, call: Call) -> str:
    facts = zip(operation.facts, call.facts, strict=True)
    return f"{operation.name}({', '.join(f'{name}={value}' for name, value in facts)})"


def _ranges(ranks: Sequence[int]) -> str:
    """Write ranks shortly: 0-3, 6."""
    parts: list[str] = []
    start = 0
    for i in range(1, len(ranks) + 1):
        if i == len(ranks) or ranks[i] != ranks[i - 1] + 1:
            first, last = ranks[start], ranks[i - 1]
            parts.append(str(first) if first == last else f"{first}-{last}")
            start = i
    return ", ".join(parts) if parts else "none"
