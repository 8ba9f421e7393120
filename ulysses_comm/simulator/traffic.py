"""What travelled: one record per collective, with sums, a table and a picture."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef


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
        digest: SHA-256 of its bytes when the run was asked for digests, else None.
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
            digest_of(tensor) if digest else None,
            StorageWeakRef(storage),
        )

    def lies_in(self, tensor: torch.Tensor) -> bool:
        """Tell whether this buffer was (part of) the memory of `tensor`, which still exists."""
        if self._storage.cdata != StorageWeakRef(tensor.untyped_storage()).cdata:
            return False
        if self.nbytes == 0 or tensor.numel() == 0:
            return self.nbytes == 0
        first = tensor.data_ptr()
        extent = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        last = first + extent * tensor.element_size()
        return first <= self.data_ptr and self.data_ptr + self.nbytes <= last


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
        """Return what a rank of the simulated world handed in."""
        for call in self.calls:
            if call.rank == rank:
                return call
        raise KeyError(f"rank {rank} took no part in {self.kind} #{self.index} of {self.group!r}")


class Traffic(Sequence[CollectiveRecord]):
    """The collectives of a simulation, in the order in which they began."""

    def __init__(self, world_size: int, records: Sequence[CollectiveRecord] = ()) -> None:
        self.world_size = world_size
        self._records = list(records)
        self.copied_bytes = [0] * world_size

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> CollectiveRecord:  # type: ignore[override]
        return self._records[index]

    def __iter__(self) -> Iterator[CollectiveRecord]:
        return iter(self._records)

    def append(self, record: CollectiveRecord) -> None:
        """Add a record."""
        self._records.append(record)

    def select(self, keep: Callable[[CollectiveRecord], bool]) -> Traffic:
        """Return the part of the record for which `keep(record)` holds."""
        return Traffic(self.world_size, [r for r in self._records if keep(r)])

    def matrix(self) -> list[list[int]]:
        """Bytes from each rank (row) to each rank (column), summed over all collectives."""
        total = [[0] * self.world_size for _ in range(self.world_size)]
        for record in self._records:
            for source, row in zip(record.ranks, record.sent, strict=False):
                for destination, nbytes in zip(record.ranks, row, strict=True):
                    total[source][destination] += nbytes
        return total
