"""Ways to cut the push of an exchange into programs, timed on GPUs that NVLink joins.

    torchrun --nproc-per-node 2 -m benchmarks.tune_push
    torchrun --nproc-per-node 2 -m benchmarks.tune_push --tokens 16384 --seconds 60

Every way is checked bit for bit, then timed as `bench_nvlink` times its candidates: interleaved,
the GPUs aligned on the device before each call, the L2 cache flushed. Figures are the slowest
rank's median in microseconds, beside flat copies of the same remote bytes to the peers.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import Candidate
from benchmarks.nvlink.groups import Groups
from benchmarks.nvlink.timing import Timed, keep_right_ones, time_on_all_ranks
from benchmarks.nvlink.ways import FLOOR, OutputExchange, QkvExchange, Shape, floor_of
from ulysses_comm import init_distributed
from ulysses_comm.symmetric.choice import state_of
from ulysses_comm.symmetric.moves import DEFAULT_TUNING, Tuning
from ulysses_comm.symmetric.state import GroupState

PUSH = "ours symmetric"  # the candidate that is cut in other ways
SHOWN = 12
TUNINGS = [
    Tuning(programs, warps, piece, tile)
    for programs, warps, piece, tile in itertools.product(
        (1, 2, 4, 8), (4, 8), (512, 1024), (8192, 16384, 32768)
    )
    if programs * warps <= 32
]


def tuned(state: GroupState, tuning: Tuning, push: Candidate) -> Candidate:
    """Return the exchange cut in one way; its tables are made once and kept."""
    state._plans = {}  # of this way alone
    state.tune(tuning)
    programs, plans = state.programs, state._plans

    def in_this_way(action: Callable[[], Any]) -> Callable[[], Any]:
        def act() -> Any:
            state.tuning, state.programs, state._plans = tuning, programs, plans
            return action()

        return act

    prepare = None if push.prepare is None else in_this_way(push.prepare)
    return Candidate(str(tuning), in_this_way(push.run), push.check, prepare)


def sweep(
    exchange: QkvExchange | OutputExchange,
    state: GroupState,
    tunings: Sequence[Tuning],
    *,
    seconds: float,
    rounds: int,
) -> tuple[dict[str, Timed], dict[str, str]]:
    """Check and time all ways to cut one exchange, and the floor; every rank calls this.

    Returns:
        What each took, by its name, and why others were left out.
    """
    device = exchange.groups.device
    (push,) = (one for one in exchange.candidates() if one.name == PUSH)
    candidates = [*(tuned(state, tuning, push) for tuning in tunings), floor_of(exchange)]
    left_out: dict[str, str] = {}
    right = keep_right_ones(candidates, device, lambda name: None, left_out)
    return time_on_all_ranks(right, device, seconds=seconds, rounds=rounds), left_out


def report(title: str, times: dict[str, Timed], left_out: dict[str, str]) -> str:
    """Put the best ways first, and the default last."""
    ways = {name: timed.us for name, timed in times.items() if name != FLOOR}
    floor = times[FLOOR].us
    lines = [f"{title}: {FLOOR} {floor:.1f} us"]
    ranked = sorted(ways.items(), key=lambda entry: entry[1])[:SHOWN]
    if str(DEFAULT_TUNING) in ways:
        ranked.append(("the default", ways[str(DEFAULT_TUNING)]))
    lines += [f"  {us:8.1f} us  {us / floor:5.2f}x  {name}" for name, us in ranked]
    lines += [f"  left out: {name}: {reason}" for name, reason in left_out.items()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Sweep both exchanges at each length."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--tokens", type=int, nargs="+", default=[3702, 16384], help="of a rank")
    add("--heads", type=int, default=24)
    add("--head-dim", type=int, default=128)
    add("--rounds", type=int, default=20)
    add("--seconds", type=float, default=60, help="of each exchange at each length, default 60")
    options = parser.parse_args(arguments)
    groups = Groups.make(init_distributed().device)
    state = None if groups.lent is None else state_of(groups.lent)
    if state is None:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in groups.left_out.items())
        dist.barrier()
        dist.destroy_process_group()
        raise SystemExit(f"there is no push to cut: {reasons}")
    with torch.no_grad():
        for tokens in options.tokens:
            shape = Shape(tokens, options.heads, options.head_dim, torch.bfloat16)
            for name, kind in (("q, k, v", QkvExchange), ("output", OutputExchange)):
                times, left_out = sweep(
                    kind(shape, groups),
                    state,
                    TUNINGS,
                    seconds=options.seconds,
                    rounds=options.rounds,
                )
                if groups.rank == 0:
                    print(report(f"{name}, {tokens} tokens a rank", times, left_out), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
