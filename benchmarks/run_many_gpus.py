"""Everything that wants several GPUs of one host, in one call or a few.

    python benchmarks/run_many_gpus.py --out DIR                     all steps, all numbers of GPUs
    python benchmarks/run_many_gpus.py --out DIR --steps tests bench     some of them
    python benchmarks/run_many_gpus.py --out DIR --seconds 540       ends in time, says what is left
    python benchmarks/run_many_gpus.py --out DIR --device cpu --world 2 4    gloo, to check this

Steps, each of them in processes of its own with a time limit; one that fails costs no other. On
four or more GPUs two ranks only run the cases and the exchanges, and faults only all ranks.
`summary.txt` and `steps.jsonl` in the folder are written as they come. A step that passed is not
run again by a further call with the same folder.

    tests   every exchange case over each transport, bits of both compared
    faults  a killed, a mismatched, a slow and a late rank
    bench   bench_nvlink: both exchanges, launched and replayed, beside the cost model's prediction
    overlap bench_nvlink: the exchange behind attention
    magi2   bench_magi2_ranks at the layouts of so many ranks
    tiny    the same with the tiny preset
    mpi     exchanges over NCCL on ranks that mpirun starts; left out where there is none
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run from a bare checkout

LAYOUTS = {2: ["sp2", "cfg2"], 4: ["sp4", "sp2cfg2"], 8: ["sp8", "sp8ep4", "sp4cfg2"]}
TAIL = 60  # lines of a failed step's output that are printed


@dataclasses.dataclass(frozen=True)
class Step:
    """One program to run.

    Attributes:
        name: Its kind and the number of ranks.
        program: What follows the interpreter.
        seconds: After which it is killed.
    """

    name: str
    program: list[str]
    seconds: float


def steps_of(kinds: Sequence[str], worlds: Sequence[int], device: str, out: Path) -> list[Step]:
    """All steps, kind by kind."""
    on_gpu = device == "cuda"
    here = str(Path(__file__).parent)
    common = ["--device", device]
    steps = []
    for kind in kinds:
        for world in _worlds_of(kind, worlds):
            ranks = ["--world", str(world)]
            name = f"{kind}-w{world}"
            if kind in ("tests", "faults"):
                only = ["--only", "cases" if kind == "tests" else "faults"]
                log = ["--out", str(out / f"cases-{device}.jsonl")]
                module = ["-m", "tests.ulysses_comm.test_nccl"]
                steps.append(Step(name, [*module, *ranks, *common, *only, *log], 240))
            elif kind == "mpi":
                module = ["-m", "tests.ulysses_comm.mpi_bootstrap"]
                steps.append(Step(name, [*module, *ranks, *common], 180))
            elif kind in ("bench", "overlap"):
                parts = ["exchange", "graph"] if kind == "bench" else ["overlap"]
                seconds = (120 if kind == "bench" else 60) if on_gpu else 30
                folder = ["--out", str(out / kind)]
                script = [f"{here}/bench_nvlink.py", "--parts", *parts, "--seconds", str(seconds)]
                if not on_gpu:
                    script += ["--rounds", "3"]
                steps.append(Step(name, [*script, *ranks, *common, *folder], seconds + 45))
            elif kind in ("magi2", "tiny") and world in LAYOUTS:
                preset = ["--preset", "preview" if kind == "magi2" and on_gpu else "tiny"]
                script = [f"{here}/bench_magi2_ranks.py", *preset, "--layout", *LAYOUTS[world]]
                limits = ["--seconds", "330", "--limit", "150", "--out", str(out / kind)]
                short = [] if on_gpu else ["--steps", "3"]
                steps.append(Step(name, [*script, *common, *limits, *short], 345))
    return steps


def _worlds_of(kind: str, worlds: Sequence[int]) -> list[int]:
    """The numbers of ranks at which a kind runs, the largest first: only such a machine has it."""
    ordered = sorted(worlds, reverse=True)
    if kind == "faults":
        return ordered[:1]
    if kind not in ("tests", "bench") and ordered[0] > 2:
        return [world for world in ordered if world > 2]
    return ordered


def run_step(step: Step, out: Path, seconds: float) -> tuple[str, float]:
    """Run one step; return how it ended, "passed" if all is well, and how long it took."""
    start = time.monotonic()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.getenv("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
    }
    with (out / f"{step.name}.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *step.program],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that its ranks can be ended with it
        )
        try:
            code = process.wait(min(step.seconds, seconds))
            ended = "passed" if code == 0 else f"FAILED, exit code {code}"
            if code and "left out: needs" in (out / f"{step.name}.log").read_text():
                ended = "left out"
        except subprocess.TimeoutExpired:
            ended = "FAILED, killed after its time limit"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # ranks that outlived their parent too
            process.wait()
    return ended, time.monotonic() - start


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    worlds = options.world or _worlds(options.device)
    if not worlds:
        raise SystemExit("no two GPUs here: run on a machine that has them, or with --device cpu")
    options.out.mkdir(parents=True, exist_ok=True)
    record = options.out / "steps.jsonl"
    passed = _passed(record, options.device)
    deadline = time.monotonic() + options.seconds
    summary = []
    for step in steps_of(options.steps, worlds, options.device, options.out):
        left = deadline - time.monotonic()
        if step.name in passed:
            ended, seconds = "passed before", 0.0
        elif left < 20:
            ended, seconds = "left: the time is over; call again with the same folder", 0.0
        else:
            print(f"== {step.name}: {' '.join(step.program)}", flush=True)
            ended, seconds = run_step(step, options.out, left)
            line = {"step": step.name, "device": options.device, "ended": ended,
                    "seconds": round(seconds, 1)}  # fmt: skip
            with record.open("a") as file:
                file.write(json.dumps(line) + "\n")
            if ended != "passed":
                _print_tail(options.out / f"{step.name}.log")
        summary.append(f"{step.name:<12} {seconds:>6.1f} s  {ended}")
        (options.out / "summary.txt").write_text("\n".join(summary) + "\n")
    _print_growth(options.out / "bench")
    print("\n".join(summary))
    bad = [line for line in summary if "FAILED" in line]
    raise SystemExit(f"{len(bad)} of {len(summary)} steps failed" if bad else 0)


def _print_tail(path: Path) -> None:
    for line in path.read_text(errors="replace").splitlines()[-TAIL:]:
        print(f"   | {line[:200]}")
    sys.stdout.flush()


def _print_growth(folder: Path) -> None:
    """How time grows with the ranks at a fixed number of tokens a rank, over all worlds so far."""
    from benchmarks.harness import print_table
    from benchmarks.nvlink.picture import draw_growth
    from benchmarks.nvlink.rows import NvlinkRow

    rows = []
    for path in sorted(folder.glob("nvlink-*.jsonl")):
        rows += [NvlinkRow(**json.loads(line)) for line in path.read_text().splitlines()]
    rows = [row for row in rows if "launched" in row.case]
    if not rows:
        return
    rows.sort(key=lambda row: (row.case.split(",")[0], row.shape[0], row.world_size))
    header = ["case", "W", "best of ours us", "which", "NCCL in place us", "floor us", "x floor",
              "GB/s sent", "predicted us"]  # fmt: skip
    cells = []
    for row in rows:
        nccl = row.baselines.get("ours in place, NCCL") or row.baselines.get("ours as a view, NCCL")
        cells.append(
            [
                row.case.rpartition(", W")[0],
                str(row.world_size),
                f"{row.ours_us:.1f}",
                row.ours,
                f"{nccl:.1f}" if nccl else "-",
                f"{row.floor_us:.1f}" if row.floor_us else "-",
                f"{row.ours_us / row.floor_us:.2f}" if row.floor_us else "-",
                f"{row.bytes / row.ours_us / 1e3:.0f}",
                f"{row.predicted_us:.0f}" if row.predicted_us else "-",
            ]
        )
    print_table("growth with the number of ranks", header, cells)
    try:
        print(draw_growth(rows, folder / f"nvlink-{rows[0].device}.png"))
    except ImportError as error:
        print(f"no picture: {error}")


def _passed(record: Path, device: str) -> set[str]:
    """Steps that have passed on this kind of device; a check on the CPU says nothing of GPUs."""
    if not record.exists():
        return set()
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    of_device = [line for line in lines if line["device"] == device]
    return {line["step"] for line in of_device if line["ended"] == "passed"}


def _worlds(device: str) -> list[int]:
    if device == "cpu":
        return [2]
    import torch

    return [size for size in (2, 4, 8) if size <= torch.cuda.device_count()]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    kinds = ["tests", "bench", "magi2", "faults", "overlap", "tiny", "mpi"]
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for logs and results")
    add("--steps", nargs="+", choices=kinds, default=kinds)
    add("--world", type=int, nargs="+", help="numbers of ranks; default 2, 4 and 8 as GPUs allow")
    add("--device", choices=["cpu", "cuda"], default="cuda")
    add("--seconds", type=float, default=570.0, help="for all of it, default 570")
    return parser


if __name__ == "__main__":
    main()
