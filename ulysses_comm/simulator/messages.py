"""Point-to-point messages: a send and a receive find each other by rank and tag."""

from __future__ import annotations

import torch

from ulysses_comm.simulator import arguments, streams
from ulysses_comm.simulator.errors import MismatchError
from ulysses_comm.simulator.recorder import Recorder
from ulysses_comm.simulator.rendezvous import Call, Group, refuse_changes
from ulysses_comm.simulator.text import describe
from ulysses_comm.simulator.traffic import CollectiveRecord, RankCall


class Message:
    """One side of a message: a posted send or a posted receive.

    A send is done when its receive has been posted, and not before, as on NCCL or with large
    messages elsewhere: two ranks that both send first are a deadlock.
    """

    def __init__(self, group: Group, call: Call, *, sends: bool, peer: int | None, tag: int):
        self.group = group
        self.call = call
        self.sends = sends
        self.peer = peer
        self.tag = tag
        self.done = False
        self.marks: streams.Marks = []
        rank = group.ranks[call.rank]
        self.booked: RankCall = group.recorder.book_call(rank, call.sends, call.async_op)

    @property
    def title(self) -> str:
        """Name of the call in reports."""
        peer = "any rank" if self.peer is None else f"rank {self.group.ranks[self.peer]}"
        kind, way = ("send", "to") if self.sends else ("recv", "from")
        return f"{kind} {way} {peer} (tag {self.tag}) on {self.group}"

    def describe(self) -> str:
        """Say what is waited for."""
        return self.title


class Mailbox:
    """The messages of one group that have not found their other side yet."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._open: list[Message] = []
        self._counts: dict[tuple[int, int], int] = {}

    def post(self, call: Call, *, sends: bool, peer: int | None, tag: int) -> Message:
        """Post one side of a message; the second side moves the data.

        Raises:
            ValueError: If the arguments are wrong on this rank already.
            MismatchError: If the two sides contradict each other.
        """
        tensor = (call.sends or call.receives)[0]
        arguments.require_dense("send" if sends else "recv", tensor=tensor)
        if peer == call.rank:
            raise ValueError(f"rank {self._group.ranks[peer]} cannot send a message to itself")
        self._group.enter(call)
        message = Message(self._group, call, sends=sends, peer=peer, tag=tag)
        self._group.protect(call)
        partner = next((other for other in self._open if _fit(message, other)), None)
        if partner is None:
            self._open.append(message)
            return message
        self._open.remove(partner)
        send, receive = (message, partner) if sends else (partner, message)
        with self._group.failing_on_error(call):
            self._complete(send, receive)
        return message

    def _complete(self, send: Message, receive: Message) -> None:
        source, destination = send.call, receive.call
        for message in (send, receive):
            if not message.call.waiting:
                rank = self._group.ranks[message.call.rank]
                refuse_changes(message.call, message.title, rank)
        sent, received = source.sends[0], destination.receives[0]
        if sent.dtype != received.dtype or sent.shape != received.shape:
            ranks = self._group.ranks
            raise MismatchError(
                f"rank {ranks[source.rank]} sends {describe(sent)} to rank "
                f"{ranks[destination.rank]}, which expects {describe(received)} "
                f"(tag {send.tag}, {self._group})"
            )
        streams.follow(source.marks)
        streams.follow(destination.marks)
        with torch.inference_mode():
            destination.prepare_targets()
            destination.targets[0].copy_(sent)
        destination.extra = source.rank
        for message in (send, receive):
            message.marks = streams.mark([received])
            message.done = True
        self._record(self._group.recorder, send, receive)

    def _record(self, recorder: Recorder, send: Message, receive: Message) -> None:
        pair = (send.call.rank, receive.call.rank)
        index = self._counts.get(pair, 0)
        self._counts[pair] = index + 1
        ranks = tuple(self._group.ranks[rank] for rank in pair)
        record = CollectiveRecord("send", self._group.name, ranks, index)
        record.calls = [send.booked, receive.booked]
        record.sent = [[0, arguments.nbytes(send.call.sends[0])], [0, 0]]
        recorder.traffic.append(record)
        for rank in ranks:
            recorder.log(record, rank)


def _fit(one: Message, other: Message) -> bool:
    return (
        one.sends != other.sends
        and one.tag == other.tag
        and one.peer in (None, other.call.rank)
        and other.peer in (None, one.call.rank)
    )
