"""What it costs to simulate ranks: starting and finishing a run, and each exchange in it.

    python benchmarks/bench_simulator.py                 # CPU tensors
    python benchmarks/bench_simulator.py --device cuda   # tensors on one GPU

Rows of one run are compared with nothing: there is no cheaper way to start threads. Rows of twenty
exchanges have as their floor the same moves by plain torch in one thread, without ranks.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a bare checkout

from benchmarks import harness
from benchmarks.harness import Candidate, Row
from ulysses_comm.simulate import simulate, simulate_all_to_all

EXCHANGES = 20


def empty_run_row(world_size: int, device: torch.device, rounds: int) -> Row:
    """Time a run whose ranks do nothing."""

    def check(results: list[int]) -> None:
        assert results == list(range(world_size)), f"got {results}"

    ours = Candidate("ours", lambda: simulate(world_size, lambda g: g.rank()).results, check)
    return harness.run_case(
        "simulator",
        f"an empty run, W {world_size}",
        device=device,
        dtype="none",
        shape=[world_size],
        nbytes=0,
        ours=ours,
        checked="every rank's result",
        rounds=rounds,
        host_clock=True,
    )


def exchanges_row(world_size: int, rows: int, device: torch.device, rounds: int) -> Row:
    """Time a run of `EXCHANGES` all-to-alls of `rows` rows of 1 KiB for each pair of ranks."""
    shape = (world_size * rows, 512)
    inputs = [torch.randn(shape, device=device).bfloat16() for _ in range(world_size)]
    counts = [[rows] * world_size] * world_size
    expected = torch.stack(simulate_all_to_all(inputs, counts))

    def run() -> torch.Tensor:
        def step(group: dist.ProcessGroup) -> torch.Tensor:
            received = torch.empty_like(inputs[group.rank()])
            for _ in range(EXCHANGES):
                dist.all_to_all_single(received, inputs[group.rank()], group=group)
            return received

        return torch.stack(simulate(world_size, step).results)

    def plainly() -> torch.Tensor:
        for _ in range(EXCHANGES):
            outputs = simulate_all_to_all(inputs, counts)
        return torch.stack(outputs)

    check = harness.expect_bits(expected)
    return harness.run_case(
        "simulator",
        f"{EXCHANGES} exchanges, W {world_size}, {rows} KiB per pair",
        device=device,
        dtype="bfloat16",
        shape=[world_size, *shape],
        nbytes=2 * EXCHANGES * expected.nbytes,
        ours=Candidate("ours", run, check),
        floor=Candidate("floor", plainly, check),
        floor_is="the same moves by torch.cat in one thread",
        checked="bits equal to the moves without ranks",
        rounds=rounds,
        host_clock=device.type == "cuda",
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all cases, print the table and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda or cuda:1")
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="folder for the results")
    parser.add_argument("--rounds", type=int, default=20, help="timed runs of each case")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = harness.usable_device(options.device)
    with harness.Results("simulator", device, options.out) as results:
        for world_size in (2, 4, 8, 64):
            results.add(empty_run_row(world_size, device, options.rounds))
        for world_size in (2, 4, 8):
            results.add(exchanges_row(world_size, 1, device, options.rounds))
        results.add(exchanges_row(8, 1024, device, options.rounds))
        harness.print_table(
            f"simulator on {harness.device_name(device)}, medians of {options.rounds}",
            *harness.table_of(results.rows),
        )
        print(f"written to {results.path}")


if __name__ == "__main__":
    main()
