"""Books what the ranks send while a simulation runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ulysses_comm.simulator.traffic import CollectiveRecord, RankCall, SentBuffer, Traffic


class Recorder:
    """The traffic of one simulation as it comes about.

    Args:
        world_size: Number of ranks.
        digests: Whether to keep a SHA-256 of every buffer that is sent.
    """

    def __init__(self, world_size: int, *, digests: bool) -> None:
        self.traffic = Traffic(world_size)
        self.digests = digests
        self._pending_copies = [0] * world_size
        self._last_calls: list[RankCall | None] = [None] * world_size
        self._open_logs: list[list[Traffic]] = [[] for _ in range(world_size)]

    def book_call(self, rank: int, sends: Sequence[torch.Tensor], async_op: bool) -> RankCall:
        """Book what one rank hands in, and on it the copies that it announced before."""
        buffers = tuple([SentBuffer.of(tensor, digest=self.digests) for tensor in sends])
        call = RankCall(rank, buffers, async_op, self._pending_copies[rank])
        self._pending_copies[rank] = 0
        self._last_calls[rank] = call
        return call

    def log(self, record: CollectiveRecord, rank: int) -> None:
        """Add a record to the logs that a rank has open."""
        for log in self._open_logs[rank]:
            log.append(record)

    def open_log(self, rank: int) -> Traffic:
        """Start a log of the collectives that a rank issues from now on."""
        log = Traffic(self.traffic.world_size)
        self._open_logs[rank].append(log)
        return log

    def close_log(self, rank: int, log: Traffic) -> None:
        """Stop adding to a log."""
        self._open_logs[rank] = [other for other in self._open_logs[rank] if other is not log]

    def record_copied_bytes(self, rank: int, nbytes: int, *, after: bool) -> None:
        """Book payload bytes copied outside a collective on a rank's last or its next one."""
        last = self._last_calls[rank]
        if not after:
            self._pending_copies[rank] += nbytes
        elif last is not None:
            last.copied_bytes += nbytes
        else:
            self.traffic.loose_copies[rank] += nbytes

    def close(self) -> None:
        """Book what was announced for a collective that never came."""
        for rank, nbytes in enumerate(self._pending_copies):
            self.traffic.loose_copies[rank] += nbytes
            self._pending_copies[rank] = 0
