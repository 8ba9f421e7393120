"""Jobs in worker processes that may die or hang: the others go on, and every result is kept."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """How a job ended: with a result, or with an error in words."""

    job: Any
    result: Any
    error: str | None


class _Worker:
    """One process, and the job that it works on."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(
            target=_serve, args=(theirs, function), daemon=True
        )
        self.process.start()
        theirs.close()
        self.job: Any = None
        self.ends = 0.0

    def give(self, job: Any, seconds: float) -> None:
        self.job, self.ends = job, time.monotonic() + seconds
        # A process that died already is noticed by the next look at its connection.
        with contextlib.suppress(OSError):
            self.connection.send(job)

    def stop(self) -> None:
        self.process.kill()
        self.process.join(5)
        self.connection.close()


def run_jobs(
    function: Callable[[Any], Any],
    jobs: Sequence[Any],
    *,
    workers: int,
    seconds: float,
    each: float,
) -> Iterator[Outcome]:
    """Yield how each job ended, as they end.

    Args:
        function: Called with a job in a worker process, which lives for many jobs; importable.
        jobs: Anything that travels to another process.
        workers: Processes.
        seconds: After which no job is begun and those under way are stopped.
        each: Seconds that a job may take before its worker is killed and replaced.
    """
    end = time.monotonic() + seconds
    waiting = list(reversed(jobs))
    idle = [_Worker(function) for _ in range(min(workers, len(jobs)))]
    busy: list[_Worker] = []
    try:
        while (waiting or busy) and time.monotonic() < end:
            while waiting and idle:
                worker = idle.pop()
                worker.give(waiting.pop(), each)
                busy.append(worker)
            soonest = min(end, *(worker.ends for worker in busy)) - time.monotonic()
            ready = wait([worker.connection for worker in busy], max(0.0, soonest))
            for worker in list(busy):
                outcome = _outcome(worker, worker.connection in ready)
                if outcome is None:
                    continue
                busy.remove(worker)
                idle.append(worker if worker.process.is_alive() else _Worker(function))
                yield outcome
        for job in [*(worker.job for worker in busy), *reversed(waiting)]:
            yield Outcome(job, None, "no time was left")
    finally:
        for worker in [*busy, *idle]:
            worker.stop()


def _outcome(worker: _Worker, ready: bool) -> Outcome | None:
    """What a worker has to say; None while it works. A worker that failed is stopped."""
    if ready:
        try:
            result, error = worker.connection.recv()
        except EOFError:
            worker.process.join(5)
            code = worker.process.exitcode
            worker.stop()
            return Outcome(worker.job, None, f"its process died with exit code {code}")
        return Outcome(worker.job, result, error)
    if time.monotonic() < worker.ends:
        return None
    worker.stop()
    return Outcome(worker.job, None, "it took too long and was killed")


def _serve(connection: Connection, function: Callable[[Any], Any]) -> None:
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        try:
            answer = (function(job), None)
        except Exception as error:
            # The last line says what is wrong, the one before where.
            where = traceback.extract_tb(error.__traceback__)[-1]
            words = f"{type(error).__name__}: {error}"[:500]
            answer = (None, f"{words} ({where.name}, line {where.lineno})")
        connection.send(answer)
