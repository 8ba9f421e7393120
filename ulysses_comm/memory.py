"""Fresh buffers that are cheap to touch for the first time.

malloc returns large blocks to the system when they are freed, so that the first write to the next
one faults in every page anew: 9216 times for 36 MiB, which takes several times as long as the
write. With huge pages it is 18 times. Asking for them is a wish, on Linux alone; where the system
does not grant it, nothing changes. It concerns the buffer, not the process.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import sys
from collections.abc import Callable, Sequence

import torch

# From this size on buffers in host memory ask for huge pages, as numpy's arrays do.
LARGE_BYTES = 4 << 20
_HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE = 14


def empty_buffer(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str | None = None
) -> torch.Tensor:
    """Return `torch.empty(shape)`, the whole of its storage; a large one asks for huge pages.

    It begins where malloc puts it, so that the pages at its ends stay small.
    """
    buffer = torch.empty(tuple(shape), dtype=dtype, device=device)
    if is_large(shape, dtype, buffer.device):
        _wish_for_huge_pages(buffer.data_ptr(), buffer.nbytes)
    return buffer


def empty_aligned(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """Return `torch.empty(shape)`; a large one in host memory is huge pages from end to end.

    Its storage is up to 2 MiB larger then: addresses alone, which nothing is ever written to.
    """
    if not is_large(shape, dtype, torch.device(device)):
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    nbytes = math.prod(shape) * dtype.itemsize
    storage = torch.empty(nbytes + _HUGE_PAGE, dtype=torch.uint8, device=device).untyped_storage()
    offset = -storage.data_ptr() % _HUGE_PAGE
    _wish_for_huge_pages(storage.data_ptr() + offset, storage.nbytes() - offset)
    return tensor_at(storage, offset, shape, dtype)


def is_large(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a tensor would be memory of this host that is worth the trouble."""
    return (
        device.type == "cpu"
        and math.prod(shape) * dtype.itemsize >= LARGE_BYTES
        and not torch.compiler.is_compiling()
        # Under a fake tensor mode tensors have no memory.
        and type(torch.empty(0, device=device)) is torch.Tensor
    )


def tensor_at(
    storage: torch.UntypedStorage, offset: int, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    """Return the contiguous tensor that begins `offset` bytes into a storage."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    tensor = torch.empty(0, dtype=dtype, device=storage.device)
    return tensor.set_(storage, offset // dtype.itemsize, tuple(shape), tuple(reversed(strides)))


def _wish_for_huge_pages(address: int, nbytes: int) -> None:
    """Ask for huge pages in place of all whole pages of a stretch of memory."""
    advise = _madvise()
    if advise is not None:
        start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        # The outcome does not matter: a kernel without huge pages refuses, and small ones serve.
        advise(start, end - start, _MADV_HUGEPAGE)


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """Return libc's madvise, or None where there is none that knows huge pages."""
    if sys.platform != "linux":
        return None
    try:
        advise = ctypes.CDLL(None).madvise
    except (AttributeError, OSError):
        return None
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    advise.restype = ctypes.c_int
    return advise
