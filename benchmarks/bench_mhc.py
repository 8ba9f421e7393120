"""What the hyper-connections cost on one rank of eight, kernel by kernel, beside their floor.

    python benchmarks/bench_mhc.py --device cuda                 # six to eight minutes
    python benchmarks/bench_mhc.py --device cuda --seconds 60    # few ways to cut the kernels

3702 tokens, four streams of 3072, bfloat16. For each operation the ways to cut it are checked and
timed as long as its share of `--seconds` lasts, the defaults first; the fastest one then runs
interleaved with the plain form, eager and compiled. The floor is bytes at 4.2 TB/s, which an H200
was measured to move. A way that fails is named and left out; each row is on disk once measured.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a bare checkout

from benchmarks import harness
from benchmarks.bench_experts import captured
from benchmarks.harness import Candidate, Row
from magi2.ops.fused_maps import sinkhorn_triton, stream_maps_triton
from magi2.ops.fused_streams import (
    hyper_connect_triton,
    mix_streams_triton,
    stream_logits_triton,
)
from magi2.ops.sinkhorn import sinkhorn_torch
from magi2.ops.stream_maps import MapWeights, stream_logits_torch, stream_maps_torch
from magi2.ops.stream_mix import hyper_connect_torch, mix_streams_torch
from magi2.ops.stream_tiles import LogitParts, LogitsTile, MapsTile, MixTile

BF16 = torch.bfloat16
BANDWIDTH = 4.2e6  # bytes in a microsecond
MAPS_BOUND = 3e-3  # relative norm of bfloat16 maps: neighbours where float32 fell otherwise
LOGITS_BOUND = 1e-5
IN_A_ROW = "ours in a row"  # a call among many in a graph
SETTINGS: dict[str, Any] = {"scale": 0.009, "iterations": 20, "eps": 1e-12}
Run = Callable[[], torch.Tensor]
Check = Callable[[torch.Tensor], None]


class Inputs:
    """Streams, maps and weights of one layer on a rank; small ones for the interpreter."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device = device
        gpu = device.type != "cpu"
        self.tokens, self.channels = (3702, 3072) if gpu else (20, 32)
        self.sizes = (3430, 250, 22) if gpu else (11, 7, 2)
        width = 4 * self.channels
        normal = partial(torch.randn, device=device)
        self.x = normal(self.tokens, 4, self.channels).to(BF16)
        self.y = normal(self.tokens, self.channels).to(BF16)
        self.weights = MapWeights(
            norm=normal(3, width) * 0.1,
            phi=normal(width, 24) * width**-0.5,
            alphas=[normal(1) for _ in range(3)],
            biases=[normal(4), normal(4), normal(4, 4)],
            norm_eps=1e-6,
        )
        self.logits = stream_logits_torch(self.x, self.weights, self.sizes)
        self.maps = stream_maps_torch(self.logits, self.weights, BF16, **SETTINGS)

    @property
    def stream_bytes(self) -> int:
        """Of one stream of all tokens."""
        return self.tokens * self.channels * BF16.itemsize


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One row of the table.

    Attributes:
        name: What the table calls it.
        nbytes: Read and written, at the least.
        plain: The torch form.
        ours: The kernels, for a tile.
        tiles: Ways to cut them, in the order in which they are worth their time.
        check: Of every result.
        others: More ways to do it.
        target: Microseconds that were asked for, in words.
    """

    name: str
    nbytes: int
    plain: Run
    ours: Callable[[Any], torch.Tensor]
    tiles: Sequence[Any]
    check: Check
    others: Sequence[Candidate] = ()
    target: str


def near(expected: torch.Tensor, bound: float) -> Check:
    """Check the norm of the difference; NaN fails."""
    scale = float(expected.float().norm())

    def check(result: torch.Tensor) -> None:
        assert result.shape == expected.shape, f"{result.shape}, expected {expected.shape}"
        error = float((result.float() - expected.float()).norm()) / scale
        assert error < bound, f"relative error {error:.1e}, expected less than {bound:.0e}"

    return check


def whole(parts: LogitParts) -> torch.Tensor:
    """The logits that the next kernel makes of the parts."""
    total = parts.parts.sum(0).t()
    return total[:, :24] * torch.rsqrt(total[:, 24:] / parts.width + parts.eps)


def maps_tiles() -> Iterator[MapsTile]:
    yield MapsTile()
    for fast, (tokens, warps) in product((True, False), ((32, 1), (64, 2), (64, 1), (128, 4))):
        yield MapsTile(tokens=tokens, num_warps=warps, fast=fast)


def mix_tiles() -> Iterator[MixTile]:
    yield MixTile()
    for channels, warps, tokens in (
        (1024, 4, 2),
        (512, 2, 1),
        (512, 2, 2),
        (256, 1, 1),
        (2048, 8, 1),
        (1024, 8, 1),
        (512, 4, 1),
        (1024, 2, 1),
        (512, 2, 4),
        (256, 1, 4),
        (4096, 8, 1),
        (4096, 16, 1),
    ):
        yield MixTile(tokens=tokens, channels=channels, num_warps=warps)


def logits_tiles() -> Iterator[LogitsTile]:
    """The default, then a mixture of all: there are more than time for them."""
    yield LogitsTile()
    yield from random.Random(0).sample(ways := list(_logits_tiles()), len(ways))


def _logits_tiles() -> Iterator[LogitsTile]:
    for depth, parts, (tokens, warps), stages in product(
        (64, 128), (8, 12, 6, 16, 4), ((128, 4), (64, 4), (128, 8)), (3, 4, 5, 2)
    ):
        yield LogitsTile(
            tokens=tokens, depth=depth, parts=parts, num_warps=warps, num_stages=stages
        )


def map_operations(inputs: Inputs) -> Iterator[Operation]:
    """Logits to maps, and the whole way from the streams to them."""
    logits, weights = inputs.logits, inputs.weights
    res = logits[:, 8:].reshape(-1, 4, 4) * 3
    matrices = sinkhorn_torch(res, 20, 1e-12).to(BF16)
    yield Operation(
        name="Sinkhorn of given logits",
        nbytes=matrices.nbytes * 3,
        plain=lambda: sinkhorn_torch(res, 20, 1e-12).to(BF16),
        ours=lambda tile: sinkhorn_triton(res, 20, 1e-12, out_dtype=BF16, tile=tile),
        tiles=list(maps_tiles()),
        check=near(matrices, MAPS_BOUND),
        target="under 8 us",
    )
    yield Operation(
        name="affine, sigmoids, Sinkhorn",
        nbytes=logits.nbytes * 3 // 2,
        plain=lambda: stream_maps_torch(logits, weights, BF16, **SETTINGS)[2],
        ours=lambda tile: stream_maps_triton(logits, weights, BF16, **SETTINGS, tile=tile)[2],
        tiles=list(maps_tiles()),
        check=near(inputs.maps[2], MAPS_BOUND),
        target="under 8 us",
    )


def logits_operations(inputs: Inputs) -> Iterator[Operation]:
    """Norm and projection, alone and with the maps behind them."""
    x, weights, sizes = inputs.x, inputs.weights, inputs.sizes

    def plain() -> torch.Tensor:
        return stream_logits_torch(x, weights, sizes)

    def maps(tile: LogitsTile, fast: bool) -> torch.Tensor:
        parts = stream_logits_triton(x, weights, sizes, tile)
        return stream_maps_triton(parts, weights, BF16, **SETTINGS, tile=MapsTile(fast=fast))[2]

    yield Operation(
        name="norm and logits",
        nbytes=x.nbytes,
        plain=plain,
        # The sum of the parts is the next kernel's: it is checked here, and not timed.
        ours=lambda tile: stream_logits_triton(x, weights, sizes, tile).parts,
        tiles=list(logits_tiles()),
        check=lambda result: near(inputs.logits, LOGITS_BOUND)(
            result
            if result.dim() == 2
            else whole(LogitParts(parts=result, width=4 * inputs.channels, eps=1e-6))
        ),
        others=[
            Candidate(
                "by stream",
                lambda: stream_logits_torch(x, weights, sizes, True),
                near(inputs.logits, LOGITS_BOUND),
            )
        ],
        target="within 2 x the floor",
    )
    yield Operation(
        name="norm, logits and maps",
        nbytes=x.nbytes,
        plain=lambda: stream_maps_torch(plain(), weights, BF16, **SETTINGS)[2],
        ours=lambda tile: maps(tile, fast=True),
        tiles=list(logits_tiles())[:4],
        check=near(inputs.maps[2], MAPS_BOUND),
        others=[
            Candidate(
                "ours, plain divisions",
                lambda: maps(LogitsTile(), fast=False),
                near(inputs.maps[2], MAPS_BOUND),
            )
        ],
        target="three launches",
    )


def mix_operations(inputs: Inputs) -> Iterator[Operation]:
    """Mixing and connecting."""
    x, y = inputs.x, inputs.y
    pre, post, res = inputs.maps
    yield Operation(
        name="pre-mix",
        nbytes=5 * inputs.stream_bytes,
        plain=lambda: mix_streams_torch(x, pre),
        ours=lambda tile: mix_streams_triton(x, pre, tile),
        tiles=list(mix_tiles()),
        check=harness.expect_bits(mix_streams_torch(x, pre)),
        target="within 1.3 x the floor",
    )
    yield Operation(
        name="hyper-connect",
        nbytes=9 * inputs.stream_bytes,
        plain=lambda: hyper_connect_torch(x, y, post, res),
        ours=lambda tile: hyper_connect_triton(x, y, post, res, tile),
        tiles=list(mix_tiles()),
        check=harness.expect_bits(hyper_connect_torch(x, y, post, res)),
        target="within 1.2 x the floor",
    )


def sweep(operation: Operation, device: torch.device, seconds: float) -> Any:
    """The fastest tile of those that are right, within the time; prints the best of them."""
    end, timed = time.monotonic() + seconds, []
    for number, tile in enumerate(operation.tiles):
        if number and time.monotonic() > end:
            print(f"  {len(operation.tiles) - number} ways were left out: no time", flush=True)
            break
        one = Candidate("tile", partial(operation.ours, tile), operation.check)
        try:
            harness.check_candidates([one], device)
            samples = harness.time_interleaved([one], device, rounds=7, warmup=1)
        except Exception as error:
            print(f"  without {tile}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        else:
            timed.append((statistics.median(samples["tile"]), number))
    if not timed:
        raise RuntimeError(f"{operation.name}: no way to cut it is right.")
    for us, number in sorted(timed)[:4]:
        print(f"  {us:8.1f} us  {operation.tiles[number]}", flush=True)
    return operation.tiles[min(timed)[1]]


def usable(candidates: Sequence[Candidate], device: torch.device) -> Iterator[Candidate]:
    """Those that run and are right; says why of the others."""
    for candidate in candidates:
        try:
            harness.check_candidates([candidate], device)
        except Exception as error:
            print(f"  without {candidate.name!r}: {type(error).__name__}: {error}", flush=True)
        else:
            yield candidate


def measure(operation: Operation, inputs: Inputs, rounds: int, seconds: float) -> Row:
    """Sweep, then time the best way against the plain form."""
    floor = operation.nbytes / BANDWIDTH
    print(f"{operation.name}: floor {floor:.1f} us, target {operation.target}", flush=True)
    tile, check = sweep(operation, inputs.device, seconds), operation.check
    torch._dynamo.reset()
    best, in_a_row = partial(operation.ours, tile), None
    baselines = [Candidate("eager", operation.plain, check), *operation.others]
    if inputs.device.type != "cpu":
        compiled = torch.compile(operation.plain, fullgraph=True, dynamic=False)
        baselines.append(Candidate("torch.compile", compiled, check))
        try:
            in_a_row = round(repeated_us(best, inputs.device), 2)
            baselines.append(Candidate("ours, graph", captured(best, inputs.device), check))
        except Exception as error:
            print(f"  without a graph: {type(error).__name__}: {error}", flush=True)
    row = harness.run_case(
        "mhc",
        operation.name,
        device=inputs.device,
        dtype="bfloat16",
        shape=[inputs.tokens, 4, inputs.channels],
        nbytes=operation.nbytes,
        ours=Candidate("ours", best, check),
        baselines=list(usable(baselines, inputs.device)),
        floor_is=f"bytes at 4.2 TB/s; target {operation.target}; {tile}",
        checked="bits where mixing alone decides them, relative norm to the plain form otherwise",
        rounds=rounds,
    )
    if in_a_row is not None:
        row = replace(row, baselines={**row.baselines, IN_A_ROW: in_a_row})
    return replace(row, floor_us=round(floor, 2))


def repeated_us(run: Run, device: torch.device, calls: int = 20) -> float:
    """Microseconds of one call among many in a graph: no launch from the host, caches warm."""

    def many() -> torch.Tensor:
        for _ in range(calls - 1):
            run()
        return run()

    replay = Candidate("graph", captured(many, device))
    samples = harness.time_interleaved([replay], device, rounds=9)
    return statistics.median(samples["graph"]) / calls


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--device", default="cuda", help="cuda (default); cpu needs TRITON_INTERPRET"
    )
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="folder for the results")
    parser.add_argument("--rounds", type=int, default=30, help="timed calls of each candidate")
    parser.add_argument(
        "--seconds", type=float, default=240.0, help="for all sweeps together, default 240"
    )
    parser.add_argument("--only", default="", help="operations whose name has this in it")
    options = parser.parse_args(arguments)
    device = harness.usable_device(options.device)
    torch.backends.cuda.matmul.allow_tf32 = False
    failed: list[str] = []
    with harness.Results("mhc", device, options.out) as results, torch.no_grad():
        inputs = Inputs(device)
        operations = [
            operation
            for group in (mix_operations, map_operations, logits_operations)
            for operation in group(inputs)
            if options.only in operation.name
        ]
        # Those with more ways get more of the time; what torch.compile takes is not counted.
        ways = [min(len(operation.tiles), 40) for operation in operations]
        for operation, count in zip(operations, ways, strict=True):
            share = options.seconds * count / sum(ways)
            # Each in its own attempt: what the others measured is worth having.
            try:
                made = measure(operation, inputs, options.rounds, share)
                results.add(made)
                print(f"  ours {made.ours_us:.1f} us, {made.baselines}", flush=True)
            except Exception as error:
                failed.append(f"{operation.name}: {type(error).__name__}: {error}")
                print(f"  failed: {failed[-1]}", flush=True)
        harness.print_table(
            f"hyper-connections on {harness.device_name(device)}, medians of {options.rounds}",
            *harness.table_of(results.rows),
        )
        for row in results.rows:
            print(f"floor, {row.case}: {row.floor}")
        print(f"written to {results.path}")
    if failed:
        raise SystemExit(f"{len(failed)} operations failed: {failed}")


if __name__ == "__main__":
    main()
