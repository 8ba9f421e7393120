"""Where each microsecond of one transformer layer goes, on one of eight ranks and one GPU.

    python benchmarks/bench_layer.py --device cuda                # all variants; about five minutes
    python benchmarks/bench_layer.py --device cuda --seconds 150  # what fits
    python benchmarks/bench_layer.py --device cuda --only static --profile

A mixture layer and a dense layer of the released widths run as rank 0 of 8 would: 3702 of 29616
tokens, 3 of 24 attention heads over all tokens, 3 of 12 heads of the mixture over the 14808 tokens
of four ranks. Exchanges are local copies of the same size and stand apart. The parts are those of
`magi2.regions`; a part's floor is what its products at 790 TFLOP/s take, float32 ones at a third of
it, or its bytes at 4.2 TB/s, whichever is more. The sum for a step counts 36 and 4 layers. Launches
are queued behind a busy GPU, so that times are the device's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a bare checkout

from benchmarks import harness
from magi2 import presets
from magi2.compiling import RegionCompiler
from magi2.config import Magi2Config
from magi2.modules.block import TransformerLayer
from magi2.modules.request import RequestPlan
from magi2.modules.sequence import SequenceDispatcher
from magi2.options import Options
from magi2.planning.layout import RankLayout
from magi2.planning.work import Work, plan_work
from magi2.regions import Regions, call_directly
from magi2.timing.bench import fill_randomly, keep_layers
from magi2.topology import Topology
from magi2.transformer import Magi2Transformer
from ulysses_comm import as_send_buffer, flatten_head_shards, pack_head_shards

TFLOPS, BANDWIDTH = 790e6, 4.2e6  # in a microsecond, as an H200 was measured
LIKE = {"mixture layer": 36, "dense layer": 4}  # of the released model's layers
RANKS, EXPERT_RANKS = 8, 4
BOUND = 3e-2  # relative error of half of the tokens: other sums swap a few tokens' routes


@dataclass(frozen=True)
class Variant:
    """A way to run the layers."""

    name: str
    compile: str = "off"
    options: Options = field(default_factory=Options)


# Everything but the attention by torch: its plain form takes 158 ms and hides the rest.
_TORCH = Options(moe_backend="torch", qkv_backend="torch", mhc_backend="torch")
VARIANTS = (
    Variant("static", "static"),
    Variant("dynamic", "dynamic"),
    Variant("eager"),
    Variant("static, torch", "static", _TORCH),
    Variant("eager, torch", "off", _TORCH),
    Variant("static, mHC by torch", "static", Options(mhc_backend="torch")),
    Variant("static, work on heads by torch", "static", Options(qkv_backend="torch")),
)


class Stopwatch:
    """Times what it is entered around, by name, in microseconds of the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.taken: list[tuple[str, Any, Any]] = []

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        with torch.profiler.record_function(name):
            start = self._now()
            yield
            self.taken.append((name, start, self._now()))

    def _now(self) -> Any:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.get_device_module(self.device).Event(enable_timing=True)
        event.record()
        return event

    def read(self) -> dict[str, float]:
        """Times since the last call; parts of a name are added up."""
        harness.synchronize(self.device)
        times: dict[str, float] = {}
        for name, start, end in self.taken:
            took = (
                (end - start) * 1e6 if isinstance(start, float) else start.elapsed_time(end) * 1e3
            )
            times[name] = times.get(name, 0.0) + took
        self.taken.clear()
        return times


@dataclass(frozen=True, kw_only=True)
class LocalExchange(SequenceDispatcher):
    """Exchanges of equal shares, in which every other rank sends what this one does: one copy."""

    name: str
    watch: Stopwatch

    def scatter_heads(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with self.watch(f"exchange to {self.name}"):
            if (send := as_send_buffer(tensors, self.world_size)) is None:
                flat = [flatten_head_shards(x) if x.dim() == 4 else x for x in tensors]
                shards = pack_head_shards(flat, self.world_size)
                send = as_send_buffer(shards, self.world_size)
            else:
                shards = list(tensors)
            assert send is not None
            received = torch.empty_like(send).copy_(send).flatten(0, 1)
        return list(received.split([x.shape[2] for x in shards], dim=1))

    def gather_head_shards(self, x: torch.Tensor) -> torch.Tensor:
        with self.watch(f"exchange from {self.name}"):
            received = torch.empty_like(x).copy_(x)
        return received.unflatten(0, (self.world_size, -1)).transpose(0, 1)

    def gather_heads(self, x: torch.Tensor) -> torch.Tensor:
        shards = self.gather_head_shards(x)
        with self.watch(f"exchange from {self.name}"):
            return flatten_head_shards(shards)


class Bench:
    """One rank's layers with random weights and streams."""

    def __init__(self, config: Magi2Config, sequences: tuple[int, int], device: torch.device):
        self.config, self.device, self.sequences = config, device, sequences
        self.tokens = sum(sequences) // RANKS
        # The first layer of each kind.
        self.layers = {"mixture layer": config.moe.layers[0], "dense layer": 0}
        self.watch = Stopwatch(device)
        torch.manual_seed(0)
        shape = (self.tokens, config.num_streams, config.hidden_size)
        self.coords = torch.randint(1, 15, (sum(sequences), 9), device=device).float()
        self.coords[:, 3:] = 28.0
        self.streams = torch.randn(shape, device=device).to(config.dtype)

    def model(self, options: Options) -> Magi2Transformer:
        """Rank 0 of 8, experts over 4."""
        topology = Topology(
            sequence_group=dist.ProcessGroup(0, RANKS),
            expert_group=dist.ProcessGroup(0, EXPERT_RANKS),
            expert_ranks=tuple(range(EXPERT_RANKS)),
        )
        options = replace(options, replicated_expert_exchange=False)
        model = Magi2Transformer(self.config, options, topology, device=self.device)
        fill_randomly(model, 0)
        return model.eval().requires_grad_(False)

    def plan(self, model: Magi2Transformer) -> RequestPlan:
        """With exchanges that stay here; this rank's tokens are all video, as most ranks' are."""
        total = sum(self.sequences)
        modality = torch.zeros(total, dtype=torch.int64, device=self.device)
        plan = model.plan(self.coords, modality, (0, self.sequences[0], total))
        groups = {"heads": plan.sequence, "experts": plan.experts}
        local = {
            name: LocalExchange(
                group=old.group, split_sizes=old.split_sizes, name=name, watch=self.watch
            )
            for name, old in groups.items()
            if isinstance(old, SequenceDispatcher)
        }
        return replace(plan, sequence=local["heads"], experts=local["experts"])

    def floors(self, kind: str) -> dict[str, float]:
        """Microseconds that the parts of a layer cannot go below."""
        layer = self.layers[kind]
        layout = RankLayout.of(self.config, self.sequences, ulysses=RANKS, expert=EXPERT_RANKS)
        upto, before = (
            plan_work(keep_layers(self.config, n), layout, 0) if n else {}
            for n in (layer + 1, layer)
        )
        floors = {}
        for name, work in upto.items():
            less = before.get(name, Work())
            own = Work(
                bf16=work.bf16 - less.bf16,
                fp32=work.fp32 - less.fp32,
                nbytes=work.nbytes - less.nbytes,
            )
            if not name.startswith("adapter") and own.nbytes:
                products = (own.bf16 + 3 * own.fp32) / TFLOPS
                # A fused kernel leaves what lies between the experts' products in the chip.
                nbytes = self._expert_bytes() if name == "experts" else own.nbytes
                floors[name] = max(products, nbytes / BANDWIDTH)
        config, width = self.config, self.config.dtype.itemsize
        rows = 2 * self.tokens * config.hidden_size * width  # read and written
        exchanges = {"exchange to heads": 3.0, "exchange from heads": 1.0}
        if layer in config.moe.layers:
            exchanges |= {"exchange to experts": 1.0, "exchange from experts": 1.0}
        return floors | {name: n * rows / BANDWIDTH for name, n in exchanges.items()}

    def _expert_bytes(self) -> float:
        """Weights of this rank's experts, its rows in, and out."""
        moe, dim = self.config.moe, self.config.moe_head_dim
        heads = moe.num_heads // EXPERT_RANKS
        weights = heads * moe.num_experts * 3 * dim * moe.expert_intermediate_size
        rows = 2 * EXPERT_RANKS * self.tokens * heads * dim
        return (weights + rows) * self.config.dtype.itemsize


def run_variant(
    bench: Bench, variant: Variant, rounds: int, profile: Path | None
) -> Iterator[tuple[str, dict[str, float], torch.Tensor]]:
    """Kind of layer, median microseconds of each part and of the whole, and the new streams."""
    model = bench.model(variant.options)
    plan = bench.plan(model)
    call: Callable[..., Any] = call_directly
    if variant.compile != "off":
        call = RegionCompiler(dynamic=variant.compile == "dynamic", deterministic=False)
    regions = Regions(model, call)
    regions.watch = bench.watch
    for kind, layer in bench.layers.items():
        module = model.block.layers[layer]
        assert isinstance(module, TransformerLayer)

        def once(module: TransformerLayer = module) -> torch.Tensor:
            with bench.watch("whole layer"):
                return regions._run_layer(module, bench.streams, plan)

        for _ in range(3):
            result = once()
        bench.watch.read()
        taken: list[dict[str, float]] = []
        for _ in range(rounds):
            if bench.device.type == "cuda":
                torch.cuda._sleep(30_000_000)  # some 15 ms, in which the host queues the layer
            once()
            taken.append(bench.watch.read())
        if profile is not None:
            write_profile(once, f"{kind}, {variant.name}", profile)
        yield kind, {name: statistics.median(t[name] for t in taken) for name in taken[0]}, result


def write_profile(run: Callable[[], Any], title: str, path: Path) -> None:
    """Append the kernels of one layer, the longest first."""
    from torch.profiler import profile

    with profile() as profiler:
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    table = profiler.key_averages().table(sort_by=by, row_limit=40, max_name_column_width=90)
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{title}\n{table}\n")


def tables(bench: Bench, times: dict[str, dict[str, dict[str, float]]]) -> None:
    """Print each layer's parts beside their floors, then a step's sums."""
    for kind, like in LIKE.items():
        floors = bench.floors(kind)
        found = {name: parts[kind] for name, parts in times.items() if kind in parts}
        names = list(dict.fromkeys(part for parts in found.values() for part in parts))
        cells = [
            [part, f"{floors[part]:.0f}" if part in floors else ""]
            + [f"{parts.get(part, 0):.0f}" for parts in found.values()]
            for part in names
        ]
        compute, exchange = (
            [sum_of(parts, exchanges=which) for parts in found.values()] for which in (False, True)
        )
        floor = sum_of(floors, exchanges=False)
        cells.append(["computing", f"{floor:.0f}", *(f"{us:.0f}" for us in compute)])
        cells.append(["exchanges as copies", "", *(f"{us:.0f}" for us in exchange)])
        ms = [f"{us * like / 1e3:.1f} ms" for us in compute]
        cells.append([f"computing x {like}", f"{floor * like / 1e3:.1f} ms", *ms])
        title = f"{kind}, {bench.tokens} tokens a rank, microseconds"
        harness.print_table(title, ["part", "floor", *found], cells)
    for name, layers in times.items():
        if len(layers) == len(LIKE):
            step = sum(n * sum_of(layers[kind], exchanges=False) for kind, n in LIKE.items())
            print(f"step, {name}: {step / 1e3:.1f} ms of computing in the block", flush=True)


def sum_of(parts: dict[str, float], *, exchanges: bool) -> float:
    """Microseconds of the exchanges, or of what is computed between them."""
    return sum(
        us
        for name, us in parts.items()
        if name.startswith("exchange") == exchanges and name != "whole layer"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="cuda (default); cpu takes tiny widths")
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="folder for the results")
    parser.add_argument("--rounds", type=int, default=20, help="timed runs of each layer")
    parser.add_argument("--only", default="", help="words that the names of variants must have")
    parser.add_argument("--profile", action="store_true", help="write a table of kernels, too")
    parser.add_argument(
        "--seconds", type=float, default=420.0, help="after which no further variant is begun"
    )
    options = parser.parse_args(arguments)
    device = harness.usable_device(options.device)
    released = device.type != "cpu"
    config = keep_layers(presets.preview(), 3) if released else presets.tiny()
    bench = Bench(config, (14601, 15015) if released else (37, 43), device)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"layer-{harness.device_name(device)}.jsonl"
    profile = path.with_suffix(".txt")
    times: dict[str, dict[str, dict[str, float]]] = {}
    expected: dict[str, torch.Tensor] = {}
    failed, end = [], time.monotonic() + options.seconds
    chosen = [v for v in VARIANTS if all(word in v.name for word in options.only.split())]
    with path.open("w", encoding="utf-8") as file, torch.no_grad():
        for variant in chosen:
            if time.monotonic() > end:
                failed.append(f"{variant.name}: not begun within {options.seconds:.0f} s")
                continue
            # Each in its own attempt: what the others measured is worth having.
            try:
                for kind, parts, result in run_variant(
                    bench, variant, options.rounds, profile if options.profile else None
                ):
                    first = expected.setdefault(kind, result).float()
                    errors = (result.float() - first).norm(dim=(1, 2)) / first.norm(dim=(1, 2))
                    error = float(errors.median())
                    record = {
                        "bench": "layer",
                        "layer": kind,
                        "variant": variant.name,
                        "device": harness.device_name(device),
                        "tokens": bench.tokens,
                        "median_us": {name: round(us, 1) for name, us in parts.items()},
                        "floor_us": {k: round(us, 1) for k, us in bench.floors(kind).items()},
                        "median_error_to_first": error,
                        "rounds": options.rounds,
                        "versions": harness.versions(),
                    }
                    file.write(json.dumps(record) + "\n")
                    file.flush()
                    print(json.dumps(record["median_us"]), kind, variant.name, flush=True)
                    if not error < BOUND:
                        raise RuntimeError(f"relative error {error:.1e} to {chosen[0].name!r}")
                    times.setdefault(variant.name, {})[kind] = parts
            except Exception as fault:
                failed.append(f"{variant.name}: {type(fault).__name__}: {fault}")
                print(failed[-1], flush=True)
            torch._dynamo.reset()
        tables(bench, times)
        print(f"written to {path}")
    if failed:
        raise SystemExit(f"{len(failed)} variants failed: {failed}")


if __name__ == "__main__":
    main()
