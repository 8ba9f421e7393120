"""Ways to cut the mixture's kernels, each checked, then timed, at the two production shapes.

    python benchmarks/tune_experts.py --seconds 240

Every way is first built in worker processes, on a few tokens; what fails there or kills its worker
is left out. One process then checks and times the rest, the most promising kinds first, and the
best of each shape once more, interleaved. Results are written line by line; the last lines are the
entries for `magi2/ops/expert_tiles.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a bare checkout

from benchmarks import harness
from benchmarks.expert_cases import SHAPES, TINY, ExpertInputs, Shape
from benchmarks.jobs import run_jobs
from magi2.ops.expert_launches import run_blocks
from magi2.ops.expert_tiles import ExpertTiles, FusedTile, HopperTile, ProductTile
from magi2.ops.fused_router import RouterTile, route_tokens_triton
from magi2.ops.route_build import (
    RouteTile,
    build_routes_torch,
    build_routes_triton,
    number_experts,
)

KINDS = ("hopper", "fused", "two products", "router", "route build")
BOUND = 2e-3
REPEATS = 7
BLOCK_ROWS = 128  # of the routes that are only built

Tiles = ExpertTiles | RouterTile | RouteTile


@dataclasses.dataclass(frozen=True)
class Job:
    """One way to run one shape; `rounds` is 0 where it only has to be built."""

    shape: Shape
    tiles: Tiles
    device: str
    rounds: int

    @property
    def kind(self) -> str:
        if isinstance(self.tiles, RouterTile):
            return "router"
        if isinstance(self.tiles, RouteTile):
            return "route build"
        if self.tiles.hopper:
            return "hopper"
        return "fused" if self.tiles.fused else "two products"


def hopper_tiles() -> Iterator[ExpertTiles]:
    """The fused form whose warps have roles; shared memory bounds the slots."""
    for slots in (5, 4, 3):
        yield ExpertTiles(block_rows=128, hopper=HopperTile(slots=slots))


def fused_tiles() -> Iterator[ExpertTiles]:
    """The fused form; its weights have to fit the shared memory beside the rows."""
    for rows, inner, warps, stages, walk, descriptors in product(
        (128, 64), (32, 64, 16), (8, 4), (3, 2, 4, 1), (0, 1), (True, False)
    ):
        # Kilobytes beside one another: rows, and three weight tiles a stage; one stage keeps none
        # in flight, and two programs then share a multiprocessor.
        kilobytes = rows // 2 + stages * inner * 3 // 2
        spills = warps == 4 and rows == 128
        # Instructions of eight columns, and plain loads where descriptors were the better ones.
        hopeless = (inner == 16 and rows < 16 * warps) or (
            not descriptors and (walk or stages == 1)
        )
        if kilobytes > 224 or spills or hopeless:
            continue
        yield ExpertTiles(
            block_rows=rows,
            fused=FusedTile(
                inner=inner,
                num_warps=warps,
                num_stages=stages,
                programs_per_unit=walk if kilobytes > 113 else 2 * walk,
                descriptors=descriptors,
            ),
        )


def product_tiles() -> Iterator[ExpertTiles]:
    """Both products apart; a gate-and-up tile is twice as wide as its columns say."""
    downs = {rows: _downs(rows) for rows in (64, 128)}
    for (rows, columns, warps), stages, walk, descriptors in product(
        ((128, 128, 8), (128, 64, 8), (64, 128, 8), (64, 128, 4), (64, 64, 4), (128, 64, 4)),
        (3, 4, 2),
        (0, 1),
        (True, False),
    ):
        kilobytes = stages * (rows + 2 * columns) // 8
        if kilobytes > 224:
            continue
        gate_up = ProductTile(
            columns=columns,
            depth=64,
            num_warps=warps,
            num_stages=stages,
            programs_per_unit=walk,
            descriptors=descriptors,
        )
        # Each first product with another second one: all pairs would take too long.
        yield ExpertTiles(block_rows=rows, gate_up=gate_up, down=next(downs[rows]))


def _downs(rows: int) -> Iterator[ProductTile]:
    wide = ((256, 8), (128, 8), (128, 4), (256, 4)) if rows == 64 else ((256, 8), (128, 8))
    while True:
        for (columns, warps), stages, walk, descriptors in product(
            wide, (3, 4), (0, 1), (True, False)
        ):
            yield ProductTile(
                columns=columns,
                depth=64,
                num_warps=warps,
                num_stages=stages,
                programs_per_unit=walk,
                descriptors=descriptors,
            )


def router_tiles() -> Iterator[RouterTile]:
    """Forms by turns, so that each is tried where the time ends early."""
    fused = product(("fused",), ((32, 4), (16, 4), (32, 8)), (32, 64), (3, 2))
    apart = product(("apart",), ((128, 8), (64, 4), (64, 8)), (64, 32), (4, 3))
    for ways in zip(apart, fused, strict=True):
        for form, (tokens, warps), depth, stages in ways:
            yield RouterTile(
                tokens=tokens, depth=depth, num_warps=warps, num_stages=stages, form=form
            )


def route_tiles() -> Iterator[RouteTile]:
    """Around the default, one thing at a time."""
    changes: list[dict[str, int]] = [{}, {"routes": 128}, {"routes": 32}]
    for routes in (64, 128):
        changes += [
            {"routes": routes, "scan": 8192},
            {"routes": routes, "scan": 8192, "scan_warps": 16},
            {"routes": routes, "scan": 4096, "scan_experts": 16},
            {"routes": routes, "scan": 2048, "scan_warps": 4},
        ]
    changes += [{"place_warps": 32}, {"place_warps": 8}]
    changes += [{"blocks": 16}, {"blocks": 64}, {"places": 256}, {"places": 1024}]
    return (RouteTile(**change) for change in changes)


@functools.lru_cache(maxsize=1)
def inputs_of(shape: Shape, device: str) -> ExpertInputs:
    """Kept for the next job of the same shape."""
    return ExpertInputs(shape, torch.device(device))


def run_job(job: Job) -> float:
    """Build and check one way, on few tokens where it is not timed; its median microseconds.

    Raises:
        AssertionError: If the result is wrong; and whatever the compiler or the launch raise.
    """
    shape = job.shape
    if not job.rounds:
        # The products know nothing of the number of experts; the router does.
        experts = shape.experts if job.kind in ("router", "route build") else min(shape.experts, 8)
        shape = dataclasses.replace(shape, tokens=min(shape.tokens, 40), experts=experts)
    with torch.no_grad():
        inputs = inputs_of(shape, job.device)
        run, check = _candidate(job.tiles, inputs)
        check(run())
        return statistics.median(_times(run, job.rounds)) if job.rounds else 0.0


def _candidate(
    tiles: Tiles, inputs: ExpertInputs
) -> tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], None]]:
    if isinstance(tiles, RouterTile):
        settings: dict[str, Any] = {**inputs.router, "tile": tiles}

        def route() -> torch.Tensor:
            return route_tokens_triton(inputs.x, inputs.gate, inputs.bias, **settings)[1]

        return route, inputs.close_to(inputs.weights, 1e-3)
    if isinstance(tiles, RouteTile):
        return _route_build(tiles, inputs)
    cut, shape = tiles, inputs.shape
    routes = build_routes_triton(inputs.choice, shape.heads * shape.experts, cut.block_rows)
    weights = inputs.weights.permute(1, 0, 2).contiguous()
    out = torch.full_like(inputs.routed, float("nan"))

    def products() -> torch.Tensor:
        run_blocks(out, inputs.x, weights, routes, *inputs.banks, cut)
        return out

    return products, inputs.close_to(inputs.routed, BOUND)


def _route_build(
    tile: RouteTile, inputs: ExpertInputs
) -> tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], None]]:
    experts, num_experts = inputs.shape.experts, inputs.shape.heads * inputs.shape.experts
    routed = number_experts(inputs.choice, experts)
    expected = build_routes_torch(routed, num_experts, BLOCK_ROWS).slots

    def build_routes() -> torch.Tensor:
        return build_routes_triton(inputs.choice, num_experts, BLOCK_ROWS, tile=tile).slots

    return build_routes, harness.expect_bits(expected)


def _times(run: Callable[[], torch.Tensor], rounds: int) -> list[float]:
    """Microseconds of each call. No flush of the L2 cache: the weights are far larger."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        run()
        return [(time.perf_counter() - start) * 1e6]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    run()
    torch.cuda._sleep(2_000_000)  # the queue fills while the device waits
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return [float(a.elapsed_time(b)) * 1e3 for a, b in pairwise(events)]


class Log:
    """The results file, and the best of each shape and kind."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("w", encoding="utf-8")
        self.timed: list[tuple[float, Job]] = []

    def add(self, job: Job, stage: str, us: float | None, error: str | None) -> None:
        line = {
            "stage": stage,
            "shape": job.shape.name,
            "kind": job.kind,
            "us": us and round(us, 1),
            "error": error,
            "tiles": repr(job.tiles),
        }
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()

    def best(self, shape: Shape, kind: str, count: int) -> list[tuple[float, Job]]:
        mine = [entry for entry in self.timed if (entry[1].shape, entry[1].kind) == (shape, kind)]
        return sorted(mine, key=lambda entry: entry[0])[:count]


def build(jobs: Sequence[Job], log: Log, workers: int, seconds: float) -> list[Job]:
    """The jobs that compile and are right on a few tokens, in the order given."""
    right, failed = set(), 0
    began = time.monotonic()
    few = [dataclasses.replace(job, rounds=0) for job in jobs]
    for outcome in run_jobs(run_job, few, workers=workers, seconds=seconds, each=60):
        if outcome.error is None:
            right.add((outcome.job.shape, outcome.job.tiles))
        else:
            failed += 1
            log.add(outcome.job, "build", None, outcome.error)
    taken = time.monotonic() - began
    print(f"built {len(right)} of {len(jobs)} ways in {taken:.0f} s, {failed} failed", flush=True)
    return [job for job in jobs if (job.shape, job.tiles) in right]


def measure(jobs: Sequence[Job], log: Log, stage: str, seconds: float) -> None:
    """Check and time the jobs one after another, in one process as long as that lives."""
    for outcome in run_jobs(run_job, jobs, workers=1, seconds=seconds, each=40):
        log.add(outcome.job, stage, outcome.result, outcome.error)
        if outcome.error is None:
            log.timed.append((outcome.result, outcome.job))
        elif outcome.error != "no time was left":
            print(f"{outcome.job.tiles}: {outcome.error}", flush=True)


def report(log: Log, shapes: Sequence[Shape]) -> None:
    for shape in shapes:
        print(f"\n{shape.name}: {shape.tokens} tokens, {shape.heads} heads; {shape.floor}")
        for kind in KINDS:
            for us, job in log.best(shape, kind, 5):
                print(f"  {us:8.1f} us  {kind}: {job.tiles}")


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """All ways in the order in which they are worth their time."""
    shapes = SHAPES if options.device != "cpu" else TINY
    kinds: dict[str, list[Tiles]] = {
        "hopper": list(hopper_tiles()) if options.device != "cpu" else [],
        "fused": list(fused_tiles()),
        "router": list(router_tiles()),
        "route build": list(route_tiles()),
        "two products": list(product_tiles()),
    }
    return [
        Job(shape, tiles, options.device, REPEATS)
        for kind, ways in kinds.items()
        if kind in (options.only or KINDS)
        for shape in shapes
        for tiles in (ways[: options.limit] if options.limit else ways)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--device", default="cuda", help="cuda (default); cpu needs TRITON_INTERPRET"
    )
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="folder for the results")
    parser.add_argument("--seconds", type=float, default=240.0, help="for all of it, default 240")
    parser.add_argument(
        "--workers", type=int, default=12, help="processes that compile, default 12"
    )
    parser.add_argument("--only", nargs="+", choices=KINDS, help="kinds of ways, default all")
    parser.add_argument("--limit", type=int, default=0, help="ways of each kind, 0 for all")
    options = parser.parse_args(arguments)
    end = time.monotonic() + options.seconds
    device = harness.usable_device(options.device)
    log = Log(options.out / f"experts-tune-{harness.device_name(device)}.jsonl")
    jobs = jobs_of(options)
    shapes = list(dict.fromkeys(job.shape for job in jobs))
    built = build(jobs, log, options.workers, 0.5 * options.seconds)
    # Shape by shape: each has its weights and its reference to make first.
    for number, shape in enumerate(shapes):
        left = (end - time.monotonic() - 10) / (len(shapes) - number)
        mine = [job for job in built if job.shape == shape]
        measure(mine, log, "sweep", 0.8 * left)
        report(log, [shape])
        best = [job for kind in KINDS for _, job in log.best(shape, kind, 4)]
        again = [dataclasses.replace(job, rounds=4 * REPEATS) for job in best]
        measure(again, log, "again", 0.2 * left)
    report(log, shapes)


if __name__ == "__main__":
    main()
