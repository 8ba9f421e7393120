"""Ranks that die, disagree or come late: every process has to end, and with an error, in time.

endings = run_fault("killed", 2, "collective", "cpu")     # how each rank ended
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tests.ranks import Outcome, rank_outcomes
from tests.ulysses_comm.transport_cases import (
    NCCL_ENVIRONMENT,
    TransportMissingError,
    World,
    _raise_if_missing,
    use,
    world_of,
)
from ulysses_comm import (
    RankDisagreementError,
    scatter_heads_gather_seqlen,
    scatter_seqlen_gather_heads,
)

PATIENCE = timedelta(seconds=8)  # of the backend and of the symmetric-memory transport
START = 30.0  # seconds to start processes and to make communicators
HEAD_DIM = 128


def exchange(
    world: World, splits: list[int], heads: int = 2, validate: Any = False
) -> torch.Tensor:
    """A layer's two exchanges, waited for by the host, the result checked."""
    tokens = splits[world.rank]
    ones = torch.ones(tokens, heads * world.size, HEAD_DIM, device=world.device)
    received = scatter_heads_gather_seqlen([ones, ones], splits, world.group, validate=validate)
    back = scatter_seqlen_gather_heads(
        received[0].contiguous(), splits, world.group, validate=validate
    )
    assert bool((back == 1).all())  # the host waits for the device here
    return back


def killed(world: World) -> str:
    """The last rank is killed between two exchanges of a loop; the others go on exchanging."""
    splits = [2048] * world.size
    for number in range(1000):
        if number == 5 and world.rank == world.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        exchange(world, splits)
        if number > 5:
            time.sleep(0.05)
    return "went on without its peer"


def mismatched(world: World) -> str:
    """Rank 1 expects fewer tokens than rank 0 sends, by more than a transport holds in flight.

    What fits into its buffers NCCL takes for sent, and says nothing. On GPUs 512 MB are too many.
    """
    good = [8192 if world.device.type == "cpu" else 1 << 18] * world.size
    exchange(world, good)
    own = list(good)
    if world.rank == 1:
        own[0] = good[0] // 8
    for _ in range(3):  # the rank that gets more than it asked for may find out late
        exchange(world, own)
    return "went unnoticed"


def mismatched_and_checked(world: World) -> str:
    """The same with `validate=True`: one error on all ranks, before anything is sent."""
    good = [512] * world.size
    exchange(world, good, validate=True)
    own = list(good)
    if world.rank == 1:
        own[0] = 64
    told = []
    for _ in range(2):
        start = time.monotonic()
        try:
            exchange(world, own, validate=True)
        except RankDisagreementError as error:
            told.append(str(error))
            assert time.monotonic() - start < PATIENCE.total_seconds() / 2, "it took a timeout"
        else:
            return "went unnoticed"
        exchange(world, good, validate=True)  # nothing was sent: the ranks can go on
    return told[0]


def slow(world: World) -> str:
    """The last rank comes late to every exchange, within the others' patience."""
    splits = [1024] * world.size
    for _ in range(3):
        if world.rank == world.size - 1:
            time.sleep(PATIENCE.total_seconds() / 6)
        exchange(world, splits)
    return "done"


def too_slow(world: World) -> str:
    """The last rank comes later than the others wait."""
    splits = [1024] * world.size
    exchange(world, splits)
    if world.rank == world.size - 1:
        time.sleep(3 * PATIENCE.total_seconds())
    for _ in range(3):
        exchange(world, splits)
    return "waited longer than asked"


FAULTS = {
    "killed": killed,
    "mismatched": mismatched,
    "mismatched and checked": mismatched_and_checked,
    "slow": slow,
    "too slow": too_slow,
}


def run_fault(name: str, world_size: int, transport: str, device: str) -> list[Outcome]:
    """Let a world of processes meet the fault; return how each one ended.

    Raises:
        TransportMissingError: If the transport cannot be used here.
    """
    outcomes = rank_outcomes(
        _meet_fault, world_size, name, transport, device,
        timeout=START + 5 * PATIENCE.total_seconds(), group_timeout=PATIENCE, meet="tcp",
        backend="nccl" if device == "cuda" else "gloo",
        environment=NCCL_ENVIRONMENT,
    )  # fmt: skip
    _raise_if_missing(outcomes)
    return outcomes


def _meet_fault(group: dist.ProcessGroup, name: str, transport: str, device: str) -> str:
    world = world_of(group, device, "collective")
    if transport != "collective":
        reason = use(transport, group, timeout=PATIENCE)
        if reason:
            raise TransportMissingError(reason)
    return FAULTS[name](world)


def judge(name: str, outcomes: list[Outcome]) -> list[str]:
    """What is wrong with how the ranks ended; nothing if all is as it should be."""
    wrong = []
    for outcome in outcomes:
        ended = f"rank {outcome.rank} {describe(outcome)}"
        if outcome.exit_code is None:
            wrong.append(f"{ended}: expected an end in time")
        elif name == "slow":
            if outcome.result != "done":
                wrong.append(f"{ended}: expected a result")
        elif name == "mismatched and checked":
            if outcome.error is not None or "[64, " not in str(outcome.result):
                wrong.append(f"{ended}: expected a disagreement that names the splits")
        elif outcome.answered and outcome.error is None:
            wrong.append(f"{ended}: expected an error")
        elif outcome.error is not None and "AssertionError" in outcome.error.types:
            wrong.append(f"{ended}: it went on with wrong data")
    if name == "mismatched and checked" and len({o.result for o in outcomes}) > 1:
        wrong.append("the ranks tell different stories")
    return wrong


def describe(outcome: Outcome) -> str:
    """How a rank ended, in a few words."""
    if outcome.error is not None:
        first = (outcome.error.message.splitlines() or [""])[0]
        return f"raised {outcome.error.types[0]} after {outcome.seconds:.1f} s: {first[:160]}"
    if outcome.answered:
        return f"returned {str(outcome.result)[:160]!r} after {outcome.seconds:.1f} s"
    if outcome.exit_code is None:
        return "was still running and was killed"
    return f"died with exit code {outcome.exit_code}"
