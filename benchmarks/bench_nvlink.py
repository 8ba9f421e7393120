"""Both exchanges between GPUs: over NCCL, through symmetric memory, against a flat peer copy.

    python benchmarks/bench_nvlink.py --out DIR               every GPU there is
    python benchmarks/bench_nvlink.py --world 2 --seconds 60 --parts exchange
    torchrun --nproc-per-node 2 benchmarks/bench_nvlink.py
    python benchmarks/bench_nvlink.py --device cpu --tokens 64    gloo: a check of this script
    python benchmarks/bench_nvlink.py --report FILE           tables of a results file, as Markdown

Every candidate is checked bit for bit on every rank, with stale buffers, before it is timed. All
candidates of a case are timed interleaved; each call starts after a barrier, and the slowest rank's
median counts. Each case has processes of its own, so that one that fails costs no other.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a bare checkout

import torch
import torch.distributed as dist

from benchmarks import harness
from benchmarks.harness import Candidate
from benchmarks.nvlink.epilogue import EpilogueExchange
from benchmarks.nvlink.groups import PATIENCE, Groups, note_flashinfer
from benchmarks.nvlink.overlap import ATTENTION, Overlap, paired_shares
from benchmarks.nvlink.rows import EPILOGUE, NvlinkRow, markdown, table_of_row
from benchmarks.nvlink.timing import (
    Timed,
    as_graph,
    keep_right_ones,
    time_on_all_ranks,
)
from benchmarks.nvlink.ways import (
    FLOOR,
    OutputExchange,
    QkvExchange,
    Shape,
    floor_of,
)
from benchmarks.processes import failure_of, run_script_on_ranks
from ulysses_comm import head_exchange_bytes

PARTS = ("exchange", "graph", "overlap", "epilogue")
TOKENS = {"cuda": (3702, 16384), "cpu": (64,)}
RETRIES = 3  # worlds of one case, after candidates that ended their processes
CHECKED = "every rank's result equals what one process cuts out of all ranks' inputs, bit by bit"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    options.tokens = options.tokens or list(TOKENS[options.device])
    if min(options.heads, options.head_dim, options.rounds, *options.tokens) < 1:
        parser.error("--tokens, --heads, --head-dim and --rounds: expected one at least")
    if options.report:
        if not options.report.is_file():
            parser.error(f"--report {options.report}: there is no such file")
        print(markdown(_read(options.report)))
    elif "RANK" in os.environ:
        _run_rank(options)
    else:
        _run_all(options)


def _run_all(options: argparse.Namespace) -> None:
    """Start the ranks of each case, collect the rows, print tables as they come."""
    device = torch.device(options.device)
    world_size = max(2, torch.cuda.device_count()) if options.world is None else options.world
    if world_size < 2 or options.heads % world_size:
        raise SystemExit(
            f"--world {world_size} --heads {options.heads}: expected two ranks at least, and heads "
            "that they divide"
        )
    cases = [(part, tokens) for part in options.parts for tokens in options.tokens]
    deadline = time.monotonic() + options.seconds
    with harness.Results("nvlink", device, options.out, suffix=f"-x{world_size}") as results:
        for number, (part, tokens) in enumerate(cases):
            left = deadline - time.monotonic()
            if left < 15:
                print(f"{part} at {tokens} tokens is left out: the time is over", flush=True)
                continue
            share = left / (len(cases) - number)
            for row in _run_case(options, world_size, part, tokens, share, left):
                results.add(row)
                harness.print_table(*table_of_row(row))
                sys.stdout.flush()
    if not results.rows:
        raise SystemExit(f"no case gave a row; {results.path} is as it was")
    print(markdown(results.rows))
    print(f"written to {results.path}")


def _run_case(
    options: argparse.Namespace, world_size: int, part: str, tokens: int, share: float, left: float
) -> list[NvlinkRow]:
    """One case in processes of its own; again without a candidate that ended them."""
    skipped = list(options.skip)
    deadline = time.monotonic() + left
    for _ in range(RETRIES):
        with tempfile.TemporaryDirectory(prefix="bench-nvlink-") as folder:
            own = ["--device", options.device, "--parts", part, "--tokens", str(tokens),
                   "--seconds", f"{max(3.0, share - 20):.0f}", "--rounds", str(options.rounds),
                   "--heads", str(options.heads), "--head-dim", str(options.head_dim),
                   "--rows", folder, "--skip", *skipped]  # fmt: skip
            if options.warm_cache:
                own.append("--warm-cache")
            codes = run_script_on_ranks(
                Path(__file__),
                own,
                world_size=world_size,
                seconds=min(deadline - time.monotonic(), share + 45),
            )
            rows = _read(Path(folder) / "rows.jsonl")
            problem = failure_of(codes)
            if rows or not problem:
                return rows
            running = Path(folder) / "running"
            name = running.read_text() if running.exists() else ""
        print(f"{part} at {tokens} tokens failed at {name or 'its start'!r}: {problem}", flush=True)
        if not name or name in skipped or time.monotonic() > deadline - 15:
            break
        skipped.append(name)
    return []


def _run_rank(options: argparse.Namespace) -> None:
    """One rank of all cases asked for."""
    rank, device = int(os.environ["RANK"]), torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        timeout=PATIENCE,
        device_id=device if device.type == "cuda" else None,
    )
    # Under torchrun nobody else keeps the rows.
    folder = options.rows or options.out
    if rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
    groups = Groups.make(device)
    note_flashinfer(groups)
    with torch.no_grad():
        for part in options.parts:
            for tokens in options.tokens:
                for row in _rows_of(part, tokens, groups, options, folder):
                    if rank == 0:
                        with (folder / "rows.jsonl").open("a") as file:
                            file.write(json.dumps(dataclasses.asdict(row)) + "\n")
                        if options.rows is None:
                            harness.print_table(*table_of_row(row))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # symmetric memory and captured graphs may not survive the groups in any order


def _rows_of(
    part: str, tokens: int, groups: Groups, options: argparse.Namespace, folder: Path
) -> list[NvlinkRow]:
    dtype = torch.bfloat16
    shape = Shape(tokens, options.heads, options.head_dim, dtype)

    def announce(name: str) -> None:
        if groups.rank == 0:
            (folder / "running").write_text(name)

    def timed(candidates: list[Candidate], seconds: float) -> tuple[dict[str, Timed], dict]:
        left_out = dict(groups.left_out)
        for name in options.skip:
            left_out.setdefault(name, "it ended its processes")
        chosen = [candidate for candidate in candidates if candidate.name not in options.skip]
        if part == "graph":
            chosen = [as_graph(candidate, groups.device) for candidate in chosen]
        right = keep_right_ones(chosen, groups.device, announce, left_out)
        times = time_on_all_ranks(
            right,
            groups.device,
            seconds=seconds,
            rounds=options.rounds,
            flush=not options.warm_cache,
        )
        return times, left_out

    if part in ("graph", "epilogue") and groups.device.type != "cuda":
        return []
    if part == "epilogue":
        epilogue = EpilogueExchange(shape, groups)
        times, left_out = timed([*epilogue.candidates(), floor_of(epilogue)], options.seconds)
        return [_epilogue_row(epilogue, times, left_out)]
    if part == "overlap":
        times, left_out = timed(Overlap(shape, groups).candidates(), options.seconds)
        return [_overlap_row(shape, groups, times, left_out)]
    rows = []
    for exchange in (QkvExchange(shape, groups), OutputExchange(shape, groups)):
        candidates = [*exchange.candidates(), floor_of(exchange)]
        times, left_out = timed(candidates, options.seconds / 2)
        rows.append(_exchange_row(part, exchange, times, left_out))
    return rows


def _exchange_row(
    part: str,
    exchange: QkvExchange | OutputExchange,
    times: dict[str, Timed],
    left_out: dict[str, str],
) -> NvlinkRow:
    shape, groups = exchange.shape, exchange.groups
    kind = "q, k, v" if exchange.inputs == 3 else "output"
    how = "replayed by a CUDA graph" if part == "graph" else "launched"
    sent = shape.remote_bytes(exchange.inputs, groups.size)
    matrix = head_exchange_bytes(exchange.splits, sent // shape.tokens // (groups.size - 1))
    return _row(
        f"{kind}, {shape.tokens} tokens a rank, W {groups.size}, {how}",
        shape,
        groups,
        times,
        left_out,
        floor=FLOOR if FLOOR in times else None,
        nbytes=sent,
        predicted_us=round(_links().all_to_all_seconds(matrix) * 1e6, 1),
    )


def _epilogue_row(
    exchange: EpilogueExchange, times: dict[str, Timed], left_out: dict[str, str]
) -> NvlinkRow:
    shape, groups = exchange.shape, exchange.groups
    return _row(
        f"{EPILOGUE} of q, k, v, {shape.tokens} tokens a rank, W {groups.size}",
        shape,
        groups,
        times,
        left_out,
        floor=FLOOR if FLOOR in times else None,
        nbytes=shape.remote_bytes(exchange.inputs, groups.size),
        checked="every result equals that of the send buffer exchanged by NCCL, bit by bit",
    )


def _overlap_row(
    shape: Shape, groups: Groups, times: dict[str, Timed], left_out: dict[str, str]
) -> NvlinkRow:
    hidden, notes = paired_shares({name: timed.by_round for name, timed in times.items()})
    return _row(
        f"q, k, v behind attention, {shape.tokens} tokens a rank, W {groups.size}",
        shape,
        groups,
        times,
        left_out,
        floor=ATTENTION if ATTENTION in times else None,
        nbytes=shape.remote_bytes(3, groups.size),
        hidden=hidden,
        notes=notes,
    )


def _row(
    case: str,
    shape: Shape,
    groups: Groups,
    times: dict[str, Timed],
    left_out: dict[str, str],
    *,
    floor: str | None,
    nbytes: int,
    predicted_us: float | None = None,
    hidden: dict[str, float] | None = None,
    notes: dict[str, str] | None = None,
    checked: str = CHECKED,
) -> NvlinkRow:
    others = {name: timed.us for name, timed in times.items() if name != floor}
    # What the ratios are about: the symmetric transport, or ours over NCCL where there is none.
    own = list(hidden) if hidden else [name for name in others if name.startswith("ours")]
    chosen = [name for name in own if "symmetric" in name] or own
    ours = min(chosen, key=lambda name: others[name], default="")
    return NvlinkRow(
        bench="nvlink",
        case=case,
        device=harness.device_name(groups.device),
        dtype=str(shape.dtype).removeprefix("torch."),
        shape=[shape.tokens, groups.size, shape.heads // groups.size, shape.head_dim],
        ours_us=others.get(ours, float("nan")),
        floor_us=times[floor].us if floor else None,
        floor=floor or "none: it is left out",
        baselines=others,
        checked=checked,
        versions=_versions(groups.device),
        bytes=nbytes,
        rounds=min((timed.rounds for timed in times.values()), default=0),
        quartiles_us={name: list(timed.quartiles) for name, timed in times.items()},
        world_size=groups.size,
        ours=ours,
        predicted_us=predicted_us,
        hidden=hidden or {},
        notes=notes or {},
        left_out=left_out,
    )


def _links() -> Any:
    from magi2.planning.devices import DEVICES

    return DEVICES["h200"].links


def _versions(device: torch.device) -> dict[str, str]:
    found = harness.versions()
    if device.type == "cuda":
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            said = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
            found["driver"] = said.stdout.split()[0]
        except (OSError, subprocess.SubprocessError, IndexError):
            found["driver"] = "unknown"
    return found


def _read(path: Path) -> list[NvlinkRow]:
    if not path.exists():
        return []
    with path.open(encoding="utf-8") as file:
        return [NvlinkRow(**json.loads(line)) for line in file]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default=device)
    add("--world", type=int, help="ranks, default all GPUs")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--tokens", type=int, nargs="+", help="of a rank; default 3702 16384, on a CPU 64")
    add("--heads", type=int, default=24, help="of q, k and v each; default 24")
    add("--head-dim", type=int, default=128, help="default 128")
    add("--seconds", type=float, default=240.0, help="for all of it, default 240")
    add("--rounds", type=int, default=40, help="timed calls of each candidate at most, default 40")
    add("--warm-cache", action="store_true", help="do not overwrite the L2 cache before a call")
    add("--skip", nargs="*", default=[], help="names of candidates to leave out")
    add("--out", type=Path, default=harness.RESULTS, help="folder for the results")
    add("--report", type=Path, help="measure nothing: print a results file as Markdown")
    add("--rows", type=Path, help=argparse.SUPPRESS)  # where a rank of this script's own puts rows
    return parser


if __name__ == "__main__":
    main()
