"""Check and time candidates that all ranks run together."""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import FLUSH_BYTES, Candidate, synchronize

CYCLES = 4_000_000  # two milliseconds of an H200: longer than a host needs to queue a call

# Told the name of the candidate that is about to run for the first time.
Announce = Callable[[str], None]


@dataclass(frozen=True)
class Timed:
    """Microseconds of one candidate: the slowest rank's median, and that rank's quartiles.

    Attributes:
        us: The median.
        quartiles: The first and the third.
        by_round: What the slowest rank of each round took; rounds of all candidates correspond.
    """

    us: float
    quartiles: tuple[float, float]
    by_round: tuple[float, ...]

    @property
    def rounds(self) -> int:
        return len(self.by_round)


def keep_right_ones(
    candidates: Sequence[Candidate],
    device: torch.device,
    announce: Announce,
    left_out: dict[str, str],
) -> list[Candidate]:
    """Run and check each candidate on every rank; leave out those that are wrong on any.

    Args:
        candidates: The same on every rank, in the same order.
        device: Of this rank.
        announce: Told the candidate's name before it runs.
        left_out: Gets the reason of each that is left out, by name.
    """
    right = []
    for candidate in candidates:
        announce(candidate.name)
        problem = _problem_of(candidate, device)
        problems: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        wrong = [f"rank {rank}: {text}" for rank, text in enumerate(problems) if text]
        if wrong:
            left_out[candidate.name] = "; ".join(wrong)
        else:
            right.append(candidate)
    announce("")
    return right


def _problem_of(candidate: Candidate, device: torch.device) -> str:
    try:
        if candidate.prepare is not None:
            candidate.prepare()
        result = candidate.run()
        synchronize(device)
        if candidate.check is not None:
            candidate.check(result)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    return ""


def time_on_all_ranks(
    candidates: Sequence[Candidate],
    device: torch.device,
    *,
    seconds: float,
    rounds: int,
    warmup: int = 3,
    flush: bool = True,
) -> dict[str, Timed]:
    """Time every candidate once per round, in an order that all ranks draw alike.

    Each call starts after a barrier and a synchronised device. On a GPU the L2 cache is then
    overwritten, the GPU kept busy until the host has queued everything, and the GPUs aligned by a
    reduction of one element: the events see the work alone.

    Args:
        candidates: The same on every rank, in the same order, all of them right.
        device: Of this rank.
        seconds: No further round starts after so long.
        rounds: At most.
        warmup: Rounds that do not count.
        flush: Whether to overwrite the L2 cache.
    """
    order, deadline = random.Random(0), time.monotonic() + seconds
    on_gpu = device.type == "cuda"
    scratch = torch.empty(
        FLUSH_BYTES if flush else 1, dtype=torch.uint8, device=device if on_gpu else "meta"
    )
    flag = torch.zeros(1, device=device)
    samples: dict[str, list[Any]] = {candidate.name: [] for candidate in candidates}
    for number in range(warmup + rounds):
        for candidate in order.sample(list(candidates), len(candidates)):
            dist.barrier()
            synchronize(device)
            taken = _cuda_call(candidate.run, scratch, flag) if on_gpu else _cpu_call(candidate.run)
            synchronize(device)
            if number >= warmup:
                samples[candidate.name].append(taken() if on_gpu else taken)
        if _first_says(time.monotonic() > deadline and number > warmup, flag):
            break
    return {name: _slowest(taken) for name, taken in samples.items()}


def _cuda_call(run: Callable[[], Any], scratch: torch.Tensor, flag: torch.Tensor) -> Any:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    scratch.zero_()
    torch.cuda._sleep(CYCLES)
    dist.all_reduce(flag)
    start.record()
    run()
    end.record()
    return lambda: float(start.elapsed_time(end)) * 1e3


def _cpu_call(run: Callable[[], Any]) -> float:
    start = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - start) / 1e3


def _first_says(stop: bool, flag: torch.Tensor) -> bool:
    flag.fill_(float(stop))
    dist.broadcast(flag, src=0)
    return bool(flag.item())


def _slowest(taken: list[float]) -> Timed:
    low, middle, high = (
        statistics.quantiles(taken, n=4, method="inclusive") if len(taken) > 1 else taken * 3
    )
    own = Timed(round(middle, 2), (round(low, 2), round(high, 2)), tuple(taken))
    everyone: list[Timed] = [own] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    slowest = max(everyone, key=lambda timed: timed.us)
    by_round = tuple(map(max, zip(*(timed.by_round for timed in everyone), strict=True)))
    return dataclasses.replace(slowest, by_round=by_round)


def as_graph(candidate: Candidate, device: torch.device) -> Candidate:
    """The candidate's work captured once; running it replays the graph.

    Every rank captures the same candidates in the same order. A failure to capture shows when the
    result is first run and checked.
    """
    captured: list[tuple[torch.cuda.CUDAGraph, Any]] = []

    def run() -> Any:
        if not captured:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    candidate.run()
            torch.cuda.current_stream().wait_stream(side)
            synchronize(device)
            graph = torch.cuda.CUDAGraph()
            # NCCL's watchdog queries events meanwhile, on a thread of its own.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                result = candidate.run()
            captured.append((graph, result))
        graph, result = captured[0]
        graph.replay()
        return result

    return Candidate(candidate.name, run, candidate.check, candidate.prepare)
