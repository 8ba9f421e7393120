"""The exchanges of this library against those of yunchang, DeepSpeed, VeOmni and diffusers.

    pip install 'ulysses-comm[bench-peers]'
    python benchmarks/bench_peers.py                 # everything, about eight minutes on two cores
    python benchmarks/bench_peers.py --world 2 --dtype fp32 --split even --direction forward

Real gloo processes of this machine, one thread each. A peer that is not installed is left out with
a message. Whether a peer runs a case at all is tried in processes of its own first, since gloo
aborts the process where messages differ in size. Then all ways are timed in one run: each round
calls each of them once, in an order drawn anew, behind a barrier; the slowest rank counts, and
ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run from a bare checkout
# The server that ranks are forked from starts a new interpreter.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.getenv("PYTHONPATH")]))
# Threads of ranks that share cores only stand in each other's way.
os.environ["OMP_NUM_THREADS"] = "1"

import torch  # noqa: E402  # after OMP_NUM_THREADS

from benchmarks import harness  # noqa: E402
from benchmarks.peers import case as cases  # noqa: E402
from benchmarks.peers.case import Case  # noqa: E402
from benchmarks.peers.ranks import RanksFailedError, run_ranks  # noqa: E402
from benchmarks.peers.registry import find_peers  # noqa: E402
from benchmarks.peers.rows import PeerRow, markdown, rows_of, summary  # noqa: E402
from benchmarks.peers.timing import measure, probe  # noqa: E402

PROBE_SECONDS = 20.0


def failures(case: Case, names: Sequence[str]) -> dict[str, str]:
    """Try each peer on the case in processes of its own; return why those that fail do."""
    reasons = {}
    for name in names:
        try:
            run_ranks(probe, case.world_size, case, name, timeout=PROBE_SECONDS)
        except RanksFailedError as failure:
            reasons[name] = str(failure)
    return reasons


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    torch.set_num_threads(1)
    device = harness.device_name(torch.device("cpu"))
    path = options.out / f"peers-{device}.jsonl"
    if options.report:
        report(path)
        return
    found = find_peers()
    versions = {**harness.versions(), "load_before": f"{os.getloadavg()[0]:.1f}"}
    for name, peer in found.peers.items():
        versions[peer.package] = peer.version
        print(f"{name} {peer.version}: {peer.calls}")
    for name, reason in found.missing.items():
        print(f"{name} is left out: {reason}")
    chosen = list(_cases(options))
    rows: list[PeerRow] = []
    options.out.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for case in chosen:
            cannot = {**found.missing, **failures(cases.probe_of(case), list(found.peers))}
            for name, reason in cannot.items():
                if name in found.peers:
                    print(f"{case.name}: {name}: {reason}")
            runs = [name for name in found.peers if name not in cannot]
            of_ranks = run_ranks(
                measure, case.world_size, case, runs, options.rounds, options.seconds,
                timeout=120 + 4 * options.seconds,
            )  # fmt: skip
            new = rows_of(case, of_ranks, cannot=cannot, device=device, versions=versions)
            rows.extend(new)
            for row in new:
                file.write(json.dumps(dataclasses.asdict(row)) + "\n")
            file.flush()
    for direction, of_direction in _by_direction(rows).items():
        harness.print_table(
            f"{direction}: time over that of 'ours, kept' (above 1, ours is faster), "
            f"[{options.tokens} tokens a rank, {options.heads}, {options.head_dim}]",
            *summary(of_direction),
        )
    print(f"written to {path}")


def report(path: Path) -> None:
    """Print the tables of a results file as Markdown."""
    with path.open(encoding="utf-8") as file:
        rows = [PeerRow(**json.loads(line)) for line in file]
    for direction, of_direction in _by_direction(rows).items():
        print(f"### {direction.capitalize()}\n\n{markdown(of_direction)}\n")


def _by_direction(rows: Sequence[PeerRow]) -> dict[str, list[PeerRow]]:
    directions = dict.fromkeys(row.direction for row in rows)
    return {name: [row for row in rows if row.direction == name] for name in directions}


def _cases(options: argparse.Namespace) -> list[Case]:
    return [
        Case(
            dtype,
            cases.split_sizes(world_size, options.tokens, even=split == "even"),
            options.heads,
            options.head_dim,
            direction == "both",
        )
        for direction in options.direction
        for world_size in options.world
        for dtype in options.dtype
        for split in options.split
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--world", type=int, nargs="+", default=[2, 4], help="ranks, default 2 4")
    add("--dtype", nargs="+", choices=list(cases.DTYPES), default=list(cases.DTYPES))
    add("--split", nargs="+", choices=["even", "uneven"], default=["even", "uneven"])
    add("--direction", nargs="+", choices=["forward", "both"], default=["forward", "both"],
        help="forward alone, forward and backward, or (default) the one and the other")  # fmt: skip
    add("--tokens", type=int, default=1024, help="of a rank, on average; default 1024")
    add("--heads", type=int, default=24, help="of q, k and v each; default 24")
    add("--head-dim", type=int, default=128, help="default 128")
    add("--rounds", type=int, default=100, help="timed calls of each way at most, default 100")
    add("--seconds", type=float, default=22.0, help="to time a case at most, default 22")
    add("--report", action="store_true", help="measure nothing: print the results as Markdown")
    add("--out", type=Path, default=harness.RESULTS, help="folder for the results")
    return parser


if __name__ == "__main__":
    main()
