"""Buffers kept between calls, so that a steady loop allocates nothing."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ulysses_comm.layout import whole_number
from ulysses_comm.memory import empty_aligned, tensor_at

# What a group keeps for exchanges without a workspace: enough for both directions of a layer whose
# q, k and v take 36 MiB on a rank, forward and backward.
SPARE_BYTES = 256 << 20


class Workspace:
    """Send and receive buffers that the exchanges of one caller reuse.

    A buffer is handed out again once nothing else refers to it: no result, no view of one, nothing
    that autograd saved. So a result is never overwritten while it can be read; a loop that drops
    its results settles on as many buffers as are alive at once, one that keeps them gets new ones.
    Given to an exchange that autograd tracks, it serves backward as well, gradients included.

    On a GPU buffers are reused in the order of the current stream, as torch's own allocator does;
    use one workspace for each stream.

    Attributes:
        allocations: Buffers made so far; constant once a loop is steady.
    """

    def __init__(self, *, limit_bytes: int | None = None) -> None:
        """Make an empty workspace.

        Args:
            limit_bytes: Keep no more than this, and let go of what was unused for longest first;
                for loops whose lengths keep changing. None keeps all.

        Raises:
            ValueError: If the limit is negative or not a whole number.
        """
        if limit_bytes is not None:
            limit_bytes = whole_number("limit_bytes", limit_bytes)
            if limit_bytes < 0:
                raise ValueError(f"limit_bytes={limit_bytes}: expected zero bytes or more.")
        self.allocations = 0
        self._limit = limit_bytes
        self._kept: list[_Block] = []  # least recently handed out first
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Callable[[int | None], Workspace], tuple[int | None]]:
        """Copy and pickle as an empty workspace of the same limit, as what holds one may need."""
        return _empty_workspace, (self._limit,)

    def take(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str
    ) -> torch.Tensor:
        """Return an unwritten contiguous tensor in a buffer of exactly its size.

        Args:
            shape: Of the tensor.
            dtype: Of the tensor.
            device: Of the tensor.
        """
        shape, device = tuple(shape), torch.device(device)
        nbytes = math.prod(shape) * dtype.itemsize
        with self._lock:
            block = self._take_kept(nbytes, device) or self._make(nbytes, device)
            # Before the lock is released: the tensor is what marks the block as in use.
            return block.tensor(shape, dtype)

    def clear(self) -> None:
        """Let go of all buffers; those still referred to live on with their tensors."""
        with self._lock:
            self._kept.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers kept."""
        return sum(block.nbytes for block in self._kept)

    def _take_kept(self, nbytes: int, device: torch.device) -> _Block | None:
        for index, block in enumerate(self._kept):
            if block.nbytes == nbytes and block.device == device and block.is_free():
                self._kept.append(self._kept.pop(index))
                return block
        return None

    def _make(self, nbytes: int, device: torch.device) -> _Block:
        self.allocations += 1
        fits = self._limit is None or self._make_room(self._limit - nbytes)
        block = _Block(nbytes, device)
        if fits:
            self._kept.append(block)
        return block

    def _make_room(self, limit: int) -> bool:
        """Let go of free buffers, the oldest first, until no more than `limit` bytes are kept."""
        index = 0
        while self.nbytes > limit and index < len(self._kept):
            if self._kept[index].is_free():
                del self._kept[index]
            else:
                index += 1
        return self.nbytes <= limit


def _empty_workspace(limit_bytes: int | None) -> Workspace:
    return Workspace(limit_bytes=limit_bytes)


class _Block:
    """A buffer, and the tensor that it was last handed out as, of which the next is an alias."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        buffer = empty_aligned((nbytes,), torch.uint8, device)
        self.nbytes, self.device = nbytes, device
        self._storage, self._offset = buffer.untyped_storage(), int(buffer.storage_offset())
        self._last: torch.Tensor | None = None

    def is_free(self) -> bool:
        """Whether nothing but this block refers to the storage."""
        own = 1 if self._last is None else 2
        return bool(torch._C._storage_Use_Count(self._storage._cdata) == own)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the buffer as a contiguous tensor of its size."""
        if self._last is None or self._last.shape != shape or self._last.dtype != dtype:
            # What inference mode makes could not be used outside of it later.
            with torch.inference_mode(False):
                self._last = tensor_at(self._storage, self._offset, shape, dtype)
        return self._last.detach()


def spare_buffers(group: dist.ProcessGroup) -> Workspace:
    """Return what a group keeps for exchanges in host memory that are given no workspace.

    malloc keeps the smaller blocks that are freed, and returns the large ones to the system, whose
    pages then cost more to get back than the exchange saves anywhere else. This keeps some of the
    large ones too, as torch does on GPUs. It goes with the group.
    """
    spare = _SPARE.get(group)
    if spare is None:
        spare = _SPARE.setdefault(group, Workspace(limit_bytes=SPARE_BYTES))
    return spare


_SPARE: weakref.WeakKeyDictionary[dist.ProcessGroup, Workspace] = weakref.WeakKeyDictionary()
