"""Moments and the seconds between them, on the host or on a device's stream."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Takes moments that become comparable once they are settled."""

    def now(self) -> Any:
        """This moment, of the work that was given to the device so far."""

    def settle(self) -> None:
        """Wait until every moment taken has happened."""

    def seconds(self, start: Any, end: Any) -> float:
        """Between two settled moments."""


class HostClock:
    """Of code that has finished when it returns: anything on a CPU."""

    def now(self) -> float:
        """Seconds since some moment."""
        return time.perf_counter()

    def settle(self) -> None:
        """Nothing: it has happened."""

    def seconds(self, start: float, end: float) -> float:
        """The difference."""
        return end - start


class DeviceClock:
    """Of work that a GPU does later: events on its current stream.

    Taking a moment does not wait for the device, so a step runs as it does without a clock. A
    collective ends for this clock when the stream that waits for it goes on.

    Args:
        device: A GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)

    def now(self) -> Any:
        """An event behind all work given to the current stream so far."""
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        return event

    def settle(self) -> None:
        """Wait for the device."""
        self._module.synchronize(self._device)

    def seconds(self, start: Any, end: Any) -> float:
        """Between two events."""
        return float(start.elapsed_time(end)) / 1e3


def clock_for(device: torch.device | str) -> Clock:
    """The clock that sees work on this device."""
    device = torch.device(device)
    return HostClock() if device.type == "cpu" else DeviceClock(device)
