"""Carry what torch and Python keep per thread from the caller into the thread of a rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from ulysses_comm.simulator.streams import initialised_gpu_module

_AUTOCAST_DEVICES = ("cpu", "cuda", "musa")


class ThreadState:
    """The caller's grad mode, inference mode, autocast, default device and GPU stream.

    torch keeps each of them per thread, so a fresh thread would start from the defaults. Other
    function or dispatch modes of the caller are not carried over.
    """

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._inference = torch.is_inference_mode_enabled()
        self._autocast: list[tuple[str, bool, Any]] = [
            (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
            for device in _AUTOCAST_DEVICES
            if device != "musa" or hasattr(torch, "musa")
        ]
        self._autocast_cache = torch.is_autocast_cache_enabled()
        modes = _get_current_function_mode_stack()
        self._device = next((m.device for m in modes if isinstance(m, DeviceContext)), None)
        self._gpu = initialised_gpu_module()
        self._gpu_stream = None if self._gpu is None else self._gpu.current_stream()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Apply the state to the calling thread for the length of a with block."""
        with contextlib.ExitStack() as stack:
            # Backward must run in the thread of its rank: torch's own device threads hold no
            # baton, and all ranks would share them.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            if self._gpu is not None:
                # Sets the device of this thread too.
                stack.enter_context(self._gpu.stream(self._gpu_stream))
            if self._inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self._grad))
            for device, enabled, dtype in self._autocast:
                if enabled:
                    stack.enter_context(
                        torch.autocast(device, dtype=dtype, cache_enabled=self._autocast_cache)
                    )
            if self._device is not None:
                stack.enter_context(self._device)
            yield
