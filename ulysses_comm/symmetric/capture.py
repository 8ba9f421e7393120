"""CUDA graphs and streams: which capture a stream is in, and how streams wait for each other."""

from __future__ import annotations

import ctypes
import functools
import itertools
from typing import Any

import torch

_unknown = itertools.count(-2, -1)


def capture_of(device: torch.device) -> int | None:
    """Return a number for the CUDA graph that the current stream is being captured into, or None.

    Where the driver does not tell which graph it is, every call counts as another.
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return None
    query = _capture_query()
    status, number = ctypes.c_int(0), ctypes.c_ulonglong(0)
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    if query is None or query(stream, ctypes.byref(status), ctypes.byref(number), None, None, None):
        return next(_unknown)
    return int(number.value)


@functools.cache
def _capture_query() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    except (OSError, AttributeError):
        return None


def is_capturing(stream: torch.cuda.Stream) -> bool:
    """Whether a stream is being captured into a CUDA graph."""
    with torch.cuda.stream(stream):
        return bool(torch.cuda.is_current_stream_capturing())


def wait_for(stream: torch.cuda.Stream, other: torch.cuda.Stream | None) -> None:
    """Let a stream wait for what another has been given so far.

    CUDA forbids it where one of them is being captured and the other is not; starting a capture
    has synchronised the device then, as `torch.cuda.graph` does.
    """
    if other is None or stream == other or is_capturing(stream) != is_capturing(other):
        return
    stream.wait_stream(other)
