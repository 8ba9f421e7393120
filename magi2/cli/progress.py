"""How a run goes on, for whoever watches: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars

# Without a terminal, about so many lines in all.
_LINES = 10


class ConsoleProgress:
    """Phases and steps on standard error.

    Args:
        console: Where to; None for standard error.

    Attributes:
        steps_done: Steps so far, those of an earlier run included.
        is_done: Whether these are all.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self.steps_done = 0
        self.is_done = False
        self._bars: Bars | None = None
        self._task: Any = None
        self._began = time.perf_counter()
        self._seconds: list[float] = []

    def phase(self, text: str) -> None:
        """Say what begins now."""
        self.close()
        self.console.print(f"{time.perf_counter() - self._began:7.1f} s  {text}")

    def step(self, done: int, total: int, seconds: float) -> None:
        """Say that a step is done."""
        self.steps_done = done
        self.is_done = done == total
        self._seconds.append(seconds)
        pace = self._pace()
        if not self.console.is_terminal:
            if done == total or done % max(1, total // _LINES) == 0:
                left = (total - done) * pace
                self.console.print(
                    f"{time.perf_counter() - self._began:7.1f} s  step {done}/{total}, "
                    f"{pace:.3g} s a step, {_clock(left)} left"
                )
            return
        if self._bars is None:
            self._bars = _make_bars(self.console)
            self._bars.start()
            self._task = self._bars.add_task("steps", total=total, completed=done - 1, pace="")
        self._bars.update(self._task, completed=done, pace=f"{pace:.3g} s/step")

    def close(self) -> None:
        """Leave the last state of the bar on the screen."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def _pace(self) -> float:
        """Mean seconds of a step; the first one also warms up, and counts only while alone."""
        counted = self._seconds[1:] or self._seconds
        return sum(counted) / len(counted)


def _make_bars(console: Console) -> Bars:
    return Bars(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[pace]}"),
        TimeElapsedColumn(),
        TextColumn("gone,"),
        TimeRemainingColumn(),
        TextColumn("left"),
        console=console,
    )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
