"""Order between the GPU streams of the ranks.

A collective runs in the thread of the rank that arrives last, on that rank's current stream. It
must come after what every rank had queued when it issued its call, and each rank's later work must
come after it. CPU tensors need nothing: exactly one thread runs at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

Marks = list[tuple[torch.device, Any]]


def initialised_gpu_module() -> Any:
    """Return torch.cuda, or torch.musa where that exists, if the process uses its GPUs; else None.

    Asks without initialising anything: a simulation of CPU ranks must not wake the GPU.
    """
    module = getattr(torch, "musa", torch.cuda)
    return module if module.is_initialized() else None


def has_streams(device: torch.device) -> bool:
    """Tell whether work on a device is queued on streams."""
    return device.type not in ("cpu", "meta")


def mark(tensors: Iterable[torch.Tensor]) -> Marks:
    """Record an event on the current stream of every GPU that holds one of the tensors."""
    devices = {tensor.device for tensor in tensors if has_streams(tensor.device)}
    marks = []
    for device in sorted(devices, key=str):
        module = torch.get_device_module(device)
        event = module.Event()
        event.record(module.current_stream(device))
        marks.append((device, event))
    return marks


def follow(marks: Marks) -> None:
    """Let the current streams of this thread wait for the marks."""
    for device, event in marks:
        torch.get_device_module(device).current_stream(device).wait_event(event)


def keep_for_current_stream(tensor: torch.Tensor) -> None:
    """Keep a tensor that another stream allocated until this thread's stream has read it."""
    if has_streams(tensor.device):
        tensor.record_stream(torch.get_device_module(tensor.device).current_stream(tensor.device))
