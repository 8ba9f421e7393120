"""Fresh buffers that are cheap to touch for the first time."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable, Sequence

import torch

# numpy asks for huge pages from the same size on.
HUGE_PAGE_BYTES = 4 << 20
_MADV_HUGEPAGE = 14


def empty_buffer(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str | None = None
) -> torch.Tensor:
    """Return `torch.empty(shape)`; a large one in host memory is backed by huge pages if possible.

    malloc returns large blocks to the system when they are freed, so that the first write to the
    next one faults in every page anew: 9216 times for 36 MiB, which takes several times as long as
    the write. With huge pages it is 18 times. It is a wish, on Linux alone; where the system does
    not grant it, nothing changes. It concerns this memory, not the process.
    """
    buffer = torch.empty(tuple(shape), dtype=dtype, device=device)
    if (
        not torch.compiler.is_compiling()
        # Subclasses, such as fake tensors, may have no memory of their own.
        and type(buffer) is torch.Tensor
        and buffer.device.type == "cpu"
        and buffer.nbytes >= HUGE_PAGE_BYTES
    ):
        _wish_for_huge_pages(buffer.data_ptr(), buffer.nbytes)
    return buffer


def _wish_for_huge_pages(address: int, nbytes: int) -> None:
    advise = _madvise()
    if advise is None:
        return
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    # The outcome does not matter: a kernel without huge pages refuses, and 4 KiB pages serve.
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
