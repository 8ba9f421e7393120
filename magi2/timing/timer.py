"""Takes the time of a rank's steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from magi2.modules.request import RequestPlan
from magi2.regions import Regions, unwatched
from magi2.timing.clock import Clock, clock_for
from magi2.timing.exchanges import watch_exchanges
from magi2.timing.records import Part, StepRecord
from magi2.transformer import Magi2Transformer


class StepTimer:
    """Takes the time of one rank's steps and of what they are made of.

    On a GPU it sets events between the kernels and waits once, at the end of each step. Ranks that
    are simulated in one process take turns: an exchange's time then holds the others' computing.

    Args:
        device: Where the model is.
        clock: Instead of the device's.
    """

    def __init__(self, device: torch.device | str, clock: Clock | None = None) -> None:
        self.records: list[StepRecord] = []
        self._clock = clock or clock_for(device)
        self._started: Any = None
        self._model_calls: list[tuple[Any, Any]] = []
        self._components: list[tuple[str, int, Any, Any]] = []
        self._exchanges: list[tuple[str, int, Any, Any]] = []
        self._attached: Magi2Transformer | None = None

    def attach(self, model: Magi2Transformer) -> None:
        """Watch a model that runs by regions, compiled or not; one that does not is made to.

        The exchanges of requests that were planned before are not seen.

        Raises:
            ValueError: If this timer watches a model already.
        """
        if self._attached is not None:
            raise ValueError("this timer watches a model already: expected one. Detach it first.")
        regions = Regions.of(model) or Regions(model)
        regions.watch = self._component
        plan, run = model.plan, model.run

        def watched_plan(*args: Any, **kwargs: Any) -> RequestPlan:
            return watch_exchanges(plan(*args, **kwargs), self._exchange)

        def watched_run(*args: Any, **kwargs: Any) -> torch.Tensor:
            start = self._clock.now()
            result = run(*args, **kwargs)
            self._model_calls.append((start, self._clock.now()))
            return result

        vars(model).update(plan=watched_plan, run=watched_run)
        self._attached = model

    def detach(self) -> None:
        """Leave the model alone; it goes on running by regions."""
        if self._attached is not None:
            regions = Regions.of(self._attached)
            if regions is not None:
                regions.watch = unwatched
            for name in ("plan", "run"):
                vars(self._attached).pop(name, None)
            self._attached = None

    @contextmanager
    def on(self, model: Magi2Transformer) -> Iterator[StepTimer]:
        """`attach` and `detach` as a context."""
        self.attach(model)
        try:
            yield self
        finally:
            self.detach()

    def start(self) -> None:
        """Begin the first step, or the next one after a pause."""
        self._clock.settle()
        for noted in (self._model_calls, self._components, self._exchanges):
            noted.clear()
        self._started = self._clock.now()

    def end_step(self) -> StepRecord:
        """End a step, and begin the next.

        Raises:
            RuntimeError: If no step was begun.
        """
        if self._started is None:
            raise RuntimeError("no step was begun: expected start() before the first step.")
        end = self._clock.now()
        self._clock.settle()
        seconds = self._clock.seconds
        record = StepRecord(
            seconds=seconds(self._started, end),
            model_seconds=sum(seconds(*moments) for moments in self._model_calls),
            components=_collect(self._components, seconds),
            exchanges=_collect(self._exchanges, seconds),
        )
        self.records.append(record)
        self.start()
        return record

    def on_step(self, state: object) -> None:
        """End a step, as what `magi2.sampler.sample` calls after each."""
        self.end_step()

    @contextmanager
    def _component(self, name: str) -> Iterator[None]:
        start = self._clock.now()
        yield
        self._components.append((name, 0, start, self._clock.now()))

    @contextmanager
    def _exchange(self, name: str, bytes_sent: int) -> Iterator[None]:
        start = self._clock.now()
        yield
        self._exchanges.append((name, bytes_sent, start, self._clock.now()))


def _collect(
    noted: list[tuple[str, int, Any, Any]], seconds: Callable[[Any, Any], float]
) -> dict[str, Part]:
    parts: dict[str, Part] = {}
    for name, bytes_sent, start, end in noted:
        before = parts.get(name, Part(seconds=0.0, count=0))
        parts[name] = Part(
            seconds=before.seconds + seconds(start, end),
            count=before.count + 1,
            bytes_sent=before.bytes_sent + bytes_sent,
        )
    return parts
