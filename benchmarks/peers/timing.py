"""What runs on each rank: check every way, then time all of them in a random order, round by round.

Both are functions of a group, for `ranks.run_ranks`.
"""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks.peers import ours, plain
from benchmarks.peers.case import Case, RankTensors, World
from benchmarks.peers.registry import find_peers
from benchmarks.peers.way import OUTPUT, QKV, Exchange, Way

WARMUP = 2


@dataclass(frozen=True)
class Sample:
    """One way's calls on one rank.

    Attributes:
        wall: Microseconds by the clock.
        cpu: Microseconds of CPU time of all threads of the rank.
        faults: Pages that had to be mapped anew, which is what fresh memory costs.
    """

    wall: list[float]
    cpu: list[float]
    faults: list[float]


Samples = dict[tuple[Exchange, str], Sample]


def probe(group: dist.ProcessGroup, case: Case, peer: str) -> None:
    """Run and check a peer once, both exchanges.

    Raises:
        AssertionError: If a result is wrong.
        NotImplementedError: If the peer has no backward and the case needs one.
    """
    for exchange in (QKV, OUTPUT):
        tensors = World(case).of_rank(exchange, group.rank())
        for way in find_peers().peers[peer].ways:
            if way.exchange == exchange:
                _check(way, case, tensors, group)


def measure(
    group: dist.ProcessGroup, case: Case, peers: Sequence[str], rounds: int, seconds: float
) -> Samples:
    """Check and time our ways and those of the peers.

    Args:
        group: The ranks.
        case: What is exchanged.
        peers: Names of the peers that run the case.
        rounds: How many rounds to time at most.
        seconds: When to stop at the latest; rank 0 decides for all.
    """
    ways = [*ours.ways(), *plain.permute_and_concatenate(), *plain.by_hand()]
    for name in peers:
        ways.extend(find_peers().peers[name].ways)
    calls: dict[tuple[Exchange, str], Callable[[], None]] = {}
    for exchange in (QKV, OUTPUT):
        tensors = World(case).of_rank(exchange, group.rank())
        for way in ways:
            if way.exchange == exchange:
                calls[exchange, way.name] = _check(way, case, tensors, group)
    samples: Samples = {key: Sample([], [], []) for key in calls}
    # The same seed on every rank: they have to call the same way.
    order = random.Random(0)
    deadline = time.monotonic() + seconds
    for number in range(-WARMUP, rounds):
        if _is_over(group, deadline):
            break
        for key in order.sample(list(calls), len(calls)):
            wall, cpu, faults = _time(calls[key], group)
            if number >= 0:
                samples[key].wall.append(wall)
                samples[key].cpu.append(cpu)
                samples[key].faults.append(faults)
    return samples


def _check(
    way: Way, case: Case, tensors: RankTensors, group: dist.ProcessGroup
) -> Callable[[], None]:
    """Run a way once, check what it returns, and return a call that drops what it returns.

    Dropping it is part of the work: buffers that are not kept have to be given back.
    """
    inputs, gradients = tensors.shaped_for(way, case.backward)
    splits = list(case.split_sizes)
    if case.backward and way.lacks_backward is not None:
        raise NotImplementedError(way.lacks_backward)
    if not case.backward:

        def call() -> None:
            with torch.no_grad():
                way.call(inputs, splits, group)

        with torch.no_grad():
            tensors.check(way.call(inputs, splits, group), None)
        return call

    # A way's results may have more axes than (tokens, heads, head_dim); their gradients then too.
    with torch.no_grad():
        shapes = [result.shape for result in way.call(inputs, splits, group)]
    shaped = [g.reshape(shape) for g, shape in zip(gradients, shapes, strict=True)]
    tensors.check(*way.forward_backward(inputs, shaped, splits, group))

    def call_with_backward() -> None:
        way.forward_backward(inputs, shaped, splits, group)

    return call_with_backward


def _time(call: Callable[[], None], group: dist.ProcessGroup) -> tuple[float, float, float]:
    faults = _page_faults()
    dist.barrier(group)
    cpu, wall = time.process_time_ns(), time.perf_counter_ns()
    call()
    wall, cpu = time.perf_counter_ns() - wall, time.process_time_ns() - cpu
    return wall / 1e3, cpu / 1e3, _page_faults() - faults


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def _is_over(group: dist.ProcessGroup, deadline: float) -> bool:
    over = torch.tensor([time.monotonic() > deadline], dtype=torch.uint8)
    dist.broadcast(over, src=0, group=group)
    return bool(over)
