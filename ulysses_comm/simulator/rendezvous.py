"""Where the ranks of a group meet: the n-th call of every rank on a group is one collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ulysses_comm.simulator import streams
from ulysses_comm.simulator.buffers import WatchedBuffer, take_over
from ulysses_comm.simulator.errors import AsyncMisuseError, MismatchError, SimulationError
from ulysses_comm.simulator.recorder import Recorder
from ulysses_comm.simulator.scheduler import Scheduler, location_of_caller
from ulysses_comm.simulator.text import ranges
from ulysses_comm.simulator.traffic import CollectiveRecord


@dataclass(slots=True)
class Call:
    """What one rank hands to a collective.

    Attributes:
        rank: Rank within the group.
        facts: What all ranks must agree about, in the order of `Operation.facts`.
        sends: Tensors that are read.
        receives: Tensors that are written.
        extra: Further arguments, for the operation.
        async_op: Whether the rank goes on before the collective is done.
        targets: Where the operation writes for each of `receives`: the tensor itself, or a stand-in
            while the rank has not called `wait()` yet.
        staged: Whether the targets are stand-ins.
        waiting: Whether the rank stands in `wait()`.
        watched: Buffers that the rank must not touch before `wait()`.
        marks: Where the rank's GPU streams stood when it made the call.
        location: Where an asynchronous call was made.
    """

    rank: int
    facts: tuple[object, ...]
    sends: list[torch.Tensor]
    receives: list[torch.Tensor]
    extra: Any = None
    async_op: bool = False
    targets: list[torch.Tensor] = field(default_factory=list)
    staged: bool = False
    waiting: bool = False
    watched: list[WatchedBuffer] = field(default_factory=list)
    marks: streams.Marks = field(default_factory=list)
    location: str = ""

    def prepare_targets(self) -> None:
        """Choose where the result goes; nothing is seen of it before `wait()`."""
        self.staged = self.async_op and not self.waiting
        if self.staged:
            self.targets = [torch.empty_like(receive) for receive in self.receives]
        else:
            self.targets = [receive.detach() for receive in self.receives]

    def deliver(self) -> None:
        """Copy a result that was kept back into the rank's own buffers."""
        if self.staged:
            with torch.inference_mode():
                for receive, target in zip(self.receives, self.targets, strict=True):
                    receive.detach().copy_(target)
                    streams.keep_for_current_stream(target)
        self.targets = []


@dataclass(frozen=True, eq=False)
class Operation:
    """A kind of collective.

    Attributes:
        name: Name of the torch.distributed function.
        facts: Names of what all ranks must agree about.
        move: Moves the data from the `sends` to the `targets` of the calls, in rank order.
        sent: Bytes from each group rank to each group rank.
        disagreements: Finds what no single call can tell: for each contradiction between calls,
            a line that names the ranks and both values. Gets the calls and the ranks' names.
    """

    name: str
    facts: tuple[str, ...]
    move: Callable[[Sequence[Call]], None]
    sent: Callable[[Sequence[Call]], list[list[int]]]
    disagreements: Callable[[Sequence[Call], Sequence[int]], list[str]] | None = None


class Group:
    """What the ranks of one group share.

    Args:
        scheduler: Runs the ranks.
        recorder: Books their traffic.
        name: The name by which reports call the group.
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
        return f"group {self.name!r} (ranks {ranges(self.ranks)})"

    def enter(self, call: Call) -> None:
        """Check that a rank may communicate now, and protect the buffers of an async call."""
        rank = self.ranks[call.rank]
        self.scheduler.require_current(rank)
        self.scheduler.raise_if_failed()
        self.scheduler.note_progress()
        if call.async_op:
            call.location = location_of_caller()

    def protect(self, call: Call) -> None:
        """Hide the result of an asynchronous call until `wait()`; remember its GPU streams."""
        if call.async_op:
            call.watched = take_over(call.sends, call.receives, digests=self.recorder.digests)
        call.marks = streams.mark([*call.sends, *call.receives])

    def meet(self, operation: Operation, call: Call) -> Meeting:
        """Take a rank's call to the collective that it belongs to; the last one moves the data.

        Raises:
            MismatchError: If the ranks contradict each other.
            AsyncMisuseError: If a rank wrote a buffer of an asynchronous call too early.
        """
        self.enter(call)
        index = self._next_index[call.rank]
        self._next_index[call.rank] = index + 1
        meeting = self._meetings.get(index)
        if meeting is None:
            meeting = self._meetings[index] = Meeting(self, operation, index)
        with self.failing_on_error(call):
            meeting.arrive(operation, call)
            if len(meeting.calls) == self.size:
                del self._meetings[index]
                meeting.complete()
        return meeting

    def calls_so_far(self, rank: int) -> int:
        """Number of collectives that a rank of the group has issued."""
        return self._next_index[rank]

    def failing_on_error(self, call: Call) -> _FailingOnError:
        """End the whole run if ranks turn out to disagree; bad arguments only concern one rank."""
        return _FailingOnError(self.scheduler, self.ranks[call.rank])


class _FailingOnError:
    def __init__(self, scheduler: Scheduler, rank: int) -> None:
        self._scheduler = scheduler
        self._rank = rank

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, SimulationError):
            self._scheduler.fail(error, self._rank)


class Meeting:
    """One collective: collects the calls of the ranks and moves the data once all are there."""

    def __init__(self, group: Group, operation: Operation, index: int) -> None:
        self.group = group
        self.operation = operation
        self.index = index
        self.done = False
        self.calls: dict[int, Call] = {}
        self.marks: streams.Marks = []
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
        return f"{self.title} (arrived: {ranges(arrived)}; missing: {ranges(missing)})"

    def arrive(self, operation: Operation, call: Call) -> None:
        """Add a rank's call, after comparing it with the first one."""
        first = next(iter(self.calls.values()), None)
        if first is not None and (operation is not self.operation or call.facts != first.facts):
            raise MismatchError(self._mismatch(first, operation, call))
        rank = self.group.ranks[call.rank]
        recorder = self.group.recorder
        self.record.calls.append(recorder.book_call(rank, call.sends, call.async_op))
        recorder.log(self.record, rank)
        self.group.protect(call)
        self.calls[call.rank] = call

    def complete(self) -> None:
        """Check the calls against each other and move the data."""
        calls = [self.calls[rank] for rank in range(self.group.size)]
        ranks = self.group.ranks
        for call in calls:
            if call.watched and not call.waiting:
                refuse_changes(call, self.title, ranks[call.rank])
        if self.operation.disagreements is not None:
            found = self.operation.disagreements(calls, ranks)
            if found:
                raise MismatchError(f"ranks disagree in {self.title}:\n  " + "\n  ".join(found))
        self.record.sent = self.operation.sent(calls)
        self.group.recorder.traffic.append(self.record)
        for call in calls:
            streams.follow(call.marks)
        with torch.inference_mode():
            for call in calls:
                call.prepare_targets()
            self.operation.move(calls)
        self.marks = streams.mark([tensor for call in calls for tensor in call.receives])
        self.done = True

    def _mismatch(self, first: Call, operation: Operation, call: Call) -> str:
        (one, one_call), (two, two_call) = sorted(
            ((self.operation, first), (operation, call)), key=lambda pair: pair[1].rank
        )
        here, there = (self.group.ranks[each.rank] for each in (one_call, two_call))
        head = f"ranks disagree about call #{self.index} of {self.group}: "
        if one is not two:
            return (
                f"{head}rank {here} called {_call_text(one, one_call)}, "
                f"rank {there} called {_call_text(two, two_call)}"
            )
        differences = [
            f"{name} is {value} on rank {here} and {other} on rank {there}"
            for name, value, other in zip(one.facts, one_call.facts, two_call.facts, strict=True)
            if value != other
        ]
        return f"{head}both called {operation.name}, but {'; '.join(differences)}"


def refuse_changes(call: Call, title: str, rank: int) -> None:
    """Raise if a buffer of an asynchronous call was written too early."""
    for buffer in call.watched:
        if buffer.changed():
            raise AsyncMisuseError(
                f"rank {rank} changed the {buffer.role} (shape {tuple(buffer.tensor.shape)}, "
                f"{buffer.tensor.dtype}) of its asynchronous {title}, issued at {call.location}, "
                f"before wait(): call wait() first, or write to another buffer"
            )


def _call_text(operation: Operation, call: Call) -> str:
    facts = zip(operation.facts, call.facts, strict=True)
    return f"{operation.name}({', '.join(f'{name}={value}' for name, value in facts)})"
