"""What every launch of a Triton kernel needs."""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager
from typing import Any

import torch


def on_device(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Make the tensor's device current: Triton launches there, whatever its arguments are on."""
    if interprets(tensor):
        return contextlib.nullcontext()
    context: AbstractContextManager[Any] = torch.get_device_module(tensor.device).device(
        tensor.device
    )
    return context


def interprets(tensor: torch.Tensor) -> bool:
    """Whether kernels on this tensor run under Triton's interpreter: nothing else serves a CPU."""
    return tensor.device.type == "cpu"


def is_hopper(device: torch.device) -> bool:
    """Whether this is a CUDA device of compute capability 9, with its 227 kB of shared memory."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Units of the device that run programs side by side; a few under the interpreter."""
    if device.type == "cpu":
        return 3
    properties = torch.get_device_module(device).get_device_properties(device)
    return int(properties.multi_processor_count)
