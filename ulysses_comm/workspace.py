"""Buffers kept between calls, so that a steady loop allocates nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ulysses_comm.memory import empty_aligned, tensor_at


class Workspace:
    """Send and receive buffers that the exchanges of one caller reuse.

    A buffer is handed out again once nothing else refers to it: no result, no view of one, nothing
    that autograd saved. So a result is never overwritten while it can be read; a loop that drops
    its results settles on as many buffers as are alive at once, one that keeps them gets new ones.
    Given to an exchange that autograd tracks, it serves backward as well, gradients included.

    On a GPU buffers are reused in the order of the current stream, as torch's own allocator does;
    use one workspace for each stream. Not for several threads.

    Attributes:
        allocations: Buffers made so far; constant once a loop is steady.
    """

    def __init__(self) -> None:
        self.allocations = 0
        self._kept: dict[tuple[torch.device, int], list[tuple[torch.UntypedStorage, int]]] = {}

    def take(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str
    ) -> torch.Tensor:
        """Return an unwritten contiguous tensor in a buffer of exactly its size.

        Args:
            shape: Of the tensor.
            dtype: Of the tensor.
            device: Of the tensor.
        """
        device = torch.device(device)
        nbytes = math.prod(shape) * dtype.itemsize
        kept = self._kept.setdefault((device, nbytes), [])
        block = next((block for block in kept if _is_free(block[0])), None)
        if block is None:
            self.allocations += 1
            buffer = empty_aligned((nbytes,), torch.uint8, device)
            block = buffer.untyped_storage(), int(buffer.storage_offset())
            kept.append(block)
        return tensor_at(*block, shape, dtype)

    def clear(self) -> None:
        """Let go of all buffers; those still referred to live on with their tensors."""
        self._kept.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers kept."""
        return sum(nbytes * len(kept) for (_, nbytes), kept in self._kept.items())


def _is_free(storage: torch.UntypedStorage) -> bool:
    """Whether the workspace alone refers to the storage."""
    return bool(torch._C._storage_Use_Count(storage._cdata) == 1)
