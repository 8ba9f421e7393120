"""What travelled: one record per collective, with sums, a table and a picture."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import overload

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ulysses_comm.simulator.text import format_bytes


@dataclass(slots=True)
class SentBuffer:
    """One tensor that a rank handed to a collective to be sent.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
        device: Its device.
        nbytes: Bytes of its elements.
        data_ptr: Address of its first element.
        storage_ptr: Address of the storage that it is a part of.
        contiguous: Whether it was contiguous.
        digest: SHA-256 of its bytes if the run was asked for digests and it has any, else None.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    nbytes: int
    data_ptr: int
    storage_ptr: int
    contiguous: bool
    digest: str | None
    # Keeps the identity of the storage from being reused, not its memory.
    _storage: StorageWeakRef = field(repr=False)

    @classmethod
    def of(cls, tensor: torch.Tensor, *, digest: bool) -> SentBuffer:
        """Describe a tensor."""
        storage = tensor.untyped_storage()
        return cls(
            tuple(tensor.shape),
            tensor.dtype,
            tensor.device,
            tensor.numel() * tensor.element_size(),
            tensor.data_ptr(),
            storage.data_ptr(),
            tensor.is_contiguous(),
            digest_of(tensor) if digest and not tensor.is_meta else None,
            StorageWeakRef(storage),
        )

    def shares_memory_with(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor that still exists is a part of this buffer, or this of it.

        Compares the storages themselves, so memory that was freed and given out again does not
        count. Nothing can be said of where no bytes come from: without any, it is True.
        """
        if tensor.numel() == 0 or self.nbytes == 0:
            return tensor.numel() == self.nbytes == 0
        if self._storage.cdata != StorageWeakRef(tensor.untyped_storage()).cdata:
            return False
        reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        first, own_first = tensor.data_ptr(), self.data_ptr
        last, own_last = first + reach * tensor.element_size(), own_first + self.nbytes
        return (own_first <= first and last <= own_last) or (
            first <= own_first and own_last <= last
        )


def digest_of(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's elements in logical order, as bytes."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    return hashlib.sha256(flat.numpy().data).hexdigest()


@dataclass(slots=True)
class RankCall:
    """One rank's part in a collective.

    Attributes:
        rank: The rank in the simulated world.
        buffers: What it sent; more than one for list and coalesced forms, none if only received.
        async_op: Whether it asked for an asynchronous result.
        copied_bytes: Payload bytes that this package copied outside the collective for it, before
            (packing) or after (flattening).
    """

    rank: int
    buffers: tuple[SentBuffer, ...]
    async_op: bool
    copied_bytes: int = 0


@dataclass(slots=True)
class CollectiveRecord:
    """One collective, or one message from a sender to a receiver.

    Attributes:
        kind: Name of the torch.distributed function.
        group: Name of the group.
        ranks: The group's ranks in the simulated world, in group order.
        index: Which call on that group this was, from 0; for messages, which one of this pair.
        calls: What each rank handed in, in order of arrival.
        sent: Bytes from each group rank (row) to each group rank (column), own share included.
    """

    kind: str
    group: str
    ranks: tuple[int, ...]
    index: int
    calls: list[RankCall] = field(default_factory=list)
    sent: list[list[int]] = field(default_factory=list)

    def call_of(self, rank: int) -> RankCall:
        """Return what a rank of the simulated world handed in.

        Raises:
            KeyError: If it took no part.
        """
        for call in self.calls:
            if call.rank == rank:
                return call
        raise KeyError(f"rank {rank} took no part in {self.kind} #{self.index} of {self.group!r}")

    @property
    def remote_bytes(self) -> int:
        """Bytes that went from one rank to another."""
        return sum(map(sum, self.sent)) - self.local_bytes

    @property
    def local_bytes(self) -> int:
        """Bytes that a rank sent to itself."""
        return sum(row[rank] for rank, row in enumerate(self.sent))

    @property
    def largest_remote_bytes(self) -> int:
        """The most bytes that a single rank sent to others."""
        return max((sum(row) - row[rank] for rank, row in enumerate(self.sent)), default=0)

    @property
    def copied_bytes(self) -> int:
        """Payload bytes that this package copied outside the collective, over all ranks."""
        return sum(call.copied_bytes for call in self.calls)


class Traffic(Sequence[CollectiveRecord]):
    """The collectives of a simulation, in the order in which they were completed.

    Attributes:
        world_size: Number of simulated ranks.
        loose_copies: Per rank, payload bytes that this package copied where no collective followed
            or preceded them.
    """

    def __init__(self, world_size: int, records: Iterable[CollectiveRecord] = ()) -> None:
        self.world_size = world_size
        self.loose_copies = [0] * world_size
        self._records = list(records)

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, index: int) -> CollectiveRecord: ...

    @overload
    def __getitem__(self, index: slice) -> Traffic: ...

    def __getitem__(self, index: int | slice) -> CollectiveRecord | Traffic:
        if isinstance(index, slice):
            return Traffic(self.world_size, self._records[index])
        return self._records[index]

    def __repr__(self) -> str:
        return (
            f"Traffic({len(self)} collectives of {self.world_size} ranks, "
            f"{format_bytes(self.remote_bytes)} between ranks)"
        )

    def __str__(self) -> str:
        return self.table()

    def append(self, record: CollectiveRecord) -> None:
        """Add a record."""
        self._records.append(record)

    def select(
        self,
        kind: str | None = None,
        *,
        group: str | None = None,
        rank: int | None = None,
    ) -> Traffic:
        """Return the collectives of this kind, on this group, in which `rank` took part."""
        return Traffic(
            self.world_size,
            (
                record
                for record in self._records
                if kind in (None, record.kind)
                and group in (None, record.group)
                and (rank is None or rank in record.ranks)
            ),
        )

    @property
    def matrix(self) -> list[list[int]]:
        """Bytes from each rank (row) to each rank (column), its own share included."""
        total = [[0] * self.world_size for _ in range(self.world_size)]
        for record in self._records:
            # Inside a run, one that other ranks have not joined yet has sent nothing.
            for source, row in zip(record.ranks, record.sent, strict=False):
                for destination, nbytes in zip(record.ranks, row, strict=True):
                    total[source][destination] += nbytes
        return total

    @property
    def remote_bytes(self) -> int:
        """Bytes that went from one rank to another."""
        return sum(record.remote_bytes for record in self._records)

    @property
    def copied_bytes(self) -> list[int]:
        """Per rank, payload bytes that this package copied outside the collectives."""
        total = list(self.loose_copies)
        for record in self._records:
            for call in record.calls:
                total[call.rank] += call.copied_bytes
        return total

    def digests(self, rank: int) -> list[str | None]:
        """Return the digest of every buffer that a rank sent, in order.

        Two runs with equal lists sent the same bytes. The entries are None unless the simulation
        was asked for digests.
        """
        return [
            buffer.digest
            for record in self._records
            for call in record.calls
            if call.rank == rank
            for buffer in call.buffers
        ]

    def sent_from(self, tensor: torch.Tensor, *, rank: int | None = None) -> bool:
        """Tell whether some collective read straight from the memory of `tensor`.

        Args:
            tensor: A tensor that still exists; a part of the buffer that was sent, or the whole of
                which a part was sent.
            rank: Only look at what this rank sent.
        """
        return any(
            buffer.shares_memory_with(tensor)
            for record in self._records
            for call in record.calls
            if rank in (None, call.rank)
            for buffer in call.buffers
        )

    def assert_sent_from(self, tensor: torch.Tensor, *, rank: int | None = None) -> None:
        """Raise AssertionError, with what was sent instead, unless `sent_from` is True."""
        if self.sent_from(tensor, rank=rank):
            return
        sent = [
            f"  {record.kind} #{record.index} of {record.group!r}, rank {call.rank}: "
            f"{buffer.nbytes} bytes at {buffer.data_ptr:#x}"
            for record in self._records
            for call in record.calls
            if rank in (None, call.rank)
            for buffer in call.buffers
        ]
        who = "no rank" if rank is None else f"rank {rank} never"
        raise AssertionError(
            f"{who} sent from the memory of the tensor of shape {tuple(tensor.shape)} at "
            f"{tensor.data_ptr():#x}; sent was:\n" + ("\n".join(sent) or "  nothing")
        )

    def table(self, *, limit: int | None = None) -> str:
        """Write the record as plain text, one line per collective and a sum.

        Args:
            limit: Show at most so many collectives, the first ones.
        """
        from ulysses_comm.simulator.table import traffic_table

        return traffic_table(self, limit=limit)

    def matrix_table(self) -> str:
        """Write the bytes from each rank to each rank as plain text."""
        from ulysses_comm.simulator.table import matrix_table

        return matrix_table(self)

    def draw(self, path: str | os.PathLike[str], *, title: str | None = None) -> None:
        """Draw the bytes from each rank to each rank as a picture.

        Args:
            path: The file; its suffix chooses the format (.png, .svg, .pdf).
            title: The first line above the picture.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed (extra `viz`).
        """
        from ulysses_comm.simulator.picture import draw_traffic

        draw_traffic(self, path, title=title)
