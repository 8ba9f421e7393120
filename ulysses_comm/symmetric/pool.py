"""Receive slots: symmetric memory that results are lent from, and that is never overwritten."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from ulysses_comm.memory import tensor_at
from ulysses_comm.symmetric.memory import Block, SymmetricMemory

_SMALLEST = 2 << 20

# A pool serves requests down to this fraction of its size, rather than a new one being made.
_SPREAD = 4


class Slot:
    """One receive buffer of this rank, and the result that it was last lent as.

    Attributes:
        index: Its number, which peers are told.
        stream: Where it was last used; None before the first use and on the CPU.
        capture: The CUDA graph that it belongs to; None if to none.
    """

    def __init__(self, index: int, block: Block) -> None:
        self.index, self.addresses = index, block.addresses
        self.stream: torch.cuda.Stream | None = None
        self.capture: int | None = None
        self._storage, self._offset = block.tensor.untyped_storage(), 0
        self._handle = block.handle
        self._last: torch.Tensor | None = None

    def is_free(self, capture: int | None = None) -> bool:
        """Whether nothing refers to its memory, and no other CUDA graph will write there again."""
        if self.capture is not None and self.capture != capture:
            return False
        own = 1 if self._last is None else 2
        return bool(torch._C._storage_Use_Count(self._storage._cdata) == own)

    def lend(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return its beginning as a contiguous tensor; the slot is taken while that is alive."""
        shape = tuple(shape)
        if self._last is None or self._last.shape != shape or self._last.dtype != dtype:
            # What inference mode makes could not be used outside of it later.
            with torch.inference_mode(False):
                self._last = tensor_at(self._storage, self._offset, shape, dtype)
        return self._last.detach()


class Pool:
    """Slots of one size, one staging slot that is never lent, and, once needed, send buffers.

    Attributes:
        nbytes: Of each.
        slots: Those that can be lent.
        staging: Where results are received that are then copied.
        bases: (slots and staging, ranks) addresses of all ranks' slots, on the device.
    """

    def __init__(
        self,
        nbytes: int,
        count: int,
        memory: SymmetricMemory,
        on_device: Callable[[list[list[int]]], torch.Tensor],
    ) -> None:
        self.nbytes = nbytes
        self.slots = [Slot(index, memory.allocate(nbytes)) for index in range(count)]
        self.staging = Slot(count, memory.allocate(nbytes))
        self.bases = on_device([list(s.addresses) for s in (*self.slots, self.staging)])

    def take(self, capture: int | None) -> Slot | None:
        """Return a slot that may be overwritten, or None if all are taken.

        Args:
            capture: The CUDA graph that is being captured. It keeps the slot for good: each replay
                writes there.
        """
        for slot in self.slots:
            if slot.is_free(capture):
                slot.capture = capture
                return slot
        return None

    @property
    def lent(self) -> int:
        """Slots that are taken."""
        return sum(not slot.is_free() for slot in self.slots)


def size_class(nbytes: int) -> int:
    """Round up to one of four sizes between two powers of two, so that few sizes occur."""
    if nbytes <= _SMALLEST:
        return _SMALLEST
    step = 1 << max(0, (nbytes - 1).bit_length() - 3)
    return math.ceil(nbytes / step) * step


class _Sized(Protocol):
    @property
    def nbytes(self) -> int: ...


SizedT = TypeVar("SizedT", bound=_Sized)


def fitting(pools: Sequence[SizedT], nbytes: int) -> SizedT | None:
    """Return the smallest pool that holds this many bytes and is not far too large, or None.

    Which one it is follows from what all ranks have asked for before, in the same order.
    """
    fit = [pool for pool in pools if pool.nbytes >= nbytes]
    best = min(fit, key=lambda pool: pool.nbytes, default=None)
    if best is None or best.nbytes > max(_SPREAD * nbytes, _SPREAD * _SMALLEST):
        return None
    return best
