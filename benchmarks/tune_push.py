"""Ways to cut the push of an exchange into programs, timed on two GPUs that NVLink joins.

    torchrun --nproc-per-node 2 -m benchmarks.tune_push

Every row is the slowest rank's median in microseconds, beside a flat copy of the same remote bytes
to the peer. All ways take turns, round after round, so that drift meets all of them alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
import torch.distributed as dist

from ulysses_comm import (
    init_distributed,
    scatter_heads_gather_seqlen,
    scatter_seqlen_gather_head_shards,
    use_transport,
)
from ulysses_comm.symmetric.choice import state_of
from ulysses_comm.symmetric.moves import DEFAULT_TUNING, Tuning
from ulysses_comm.symmetric.state import GroupState

HEADS, HEAD_DIM = 24, 128
TUNINGS = [
    Tuning(programs, warps, piece, tile)
    for programs, warps, piece, tile in itertools.product(
        (1, 2, 4, 8), (4, 8), (512, 1024), (8192, 16384, 32768)
    )
    if programs * warps <= 32
]
ROUNDS, WARM = 20, 3


def timed(action: Callable[[], object]) -> float:
    """Return microseconds of one call, both ranks starting together."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier()
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000)  # hides the host's part of the launch
    start.record()
    action()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3


def medians(ways: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the slowest rank's median of every way."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(WARM + ROUNDS):
        for name, action in ways.items():
            microseconds = timed(action)
            if round_number >= WARM:
                times[name].append(microseconds)
    found = torch.tensor([sorted(values)[ROUNDS // 2] for values in times.values()], device="cuda")
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return dict(zip(times, found.tolist(), strict=True))


def tuned(
    state: GroupState, tuning: Tuning, exchange: Callable[[], object]
) -> Callable[[], object]:
    """Return the exchange cut in one way; its tables are made once and kept."""
    plans: dict[object, object] = {}

    def action() -> object:
        state.tuning, state._plans = tuning, plans  # type: ignore[assignment]
        return exchange()

    state.tune(tuning)
    programs = state.programs

    def with_programs() -> object:
        state.programs = programs
        return action()

    with_programs()
    return with_programs


def sweep(state: GroupState, tokens: int) -> None:
    """Print both exchanges at one length, the best ways first."""
    world, rank = dist.get_world_size(), dist.get_rank()
    splits, group = [tokens] * world, dist.group.WORLD
    q, k, v = (
        torch.randn(tokens, HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16) for _ in range(3)
    )
    attended = torch.randn(
        tokens * world, HEADS // world, HEAD_DIM, device="cuda", dtype=torch.bfloat16
    )
    exchanges: dict[str, tuple[int, Callable[[], object]]] = {
        "q, k, v": (3, lambda: scatter_heads_gather_seqlen([q, k, v], splits, group)),
        "output": (1, lambda: scatter_seqlen_gather_head_shards(attended, splits, group)),
    }
    for name, (inputs, exchange) in exchanges.items():
        nbytes = inputs * tokens * (HEADS // world) * HEAD_DIM * 2
        block = state.send_buffers(nbytes)[0]
        source = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        peer = block.peers[(rank + 1) % world][:nbytes]
        ways = {str(tuning): tuned(state, tuning, exchange) for tuning in TUNINGS}
        ways["flat copy to the peer"] = lambda to=peer, of=source: to.copy_(of, non_blocking=True)
        found = medians(ways)
        floor = found.pop("flat copy to the peer")
        if rank == 0:
            print(f"{name}, {tokens} tokens a rank: flat copy to the peer {floor:.1f} us")
            ranked = sorted(found.items(), key=lambda entry: entry[1])
            for way, microseconds in ranked[:12]:
                print(f"  {microseconds:8.1f} us  {microseconds / floor:5.2f}x  {way}")
            default = found[str(DEFAULT_TUNING)]
            print(f"  {default:8.1f} us  {default / floor:5.2f}x  the default")


def main() -> None:
    """Sweep both lengths."""
    init_distributed()
    choice = use_transport(None, "symm_mem")
    if dist.get_rank() == 0:
        print(choice)
    group = dist.group.WORLD
    assert group is not None
    state = state_of(group)
    assert state is not None
    for tokens in (3702, 16384):
        sweep(state, tokens)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
