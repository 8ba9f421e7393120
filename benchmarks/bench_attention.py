"""What the attention costs on one rank of eight: the kernel, and the work on heads around it.

    python benchmarks/bench_attention.py --device cuda                 # three to five minutes
    python benchmarks/bench_attention.py --device cuda --seconds 120   # what fits in two minutes

Attention of two sequences of 14808 tokens with sinks, 3 heads of 128, bfloat16, by every backend
that runs here, on slices of the receive buffer and on dense tensors. Then what precedes and follows
it for 3702 tokens and 24 heads: norms, rotation and pack; gather and gate; the sinks' product.
Those are replayed as graphs, so that launches from the host do not count. A candidate that fails is
named and left out, and each row is on disk as soon as it is measured.
"""

from __future__ import annotations

import argparse
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a bare checkout

from benchmarks import harness
from benchmarks.bench_experts import captured
from benchmarks.harness import Candidate, Row
from magi2.ops.attention import sink_weights_torch
from magi2.ops.attention_backends import ATTENTION_BACKENDS, attend_with_sinks, choose_attention
from magi2.ops.attention_heads import (
    HeadTile,
    gate_heads_torch,
    gate_heads_triton,
    rotated_heads_torch,
    store_heads_triton,
    weigh_heads_triton,
)
from magi2.ops.packed_sequences import PackedSequences
from ulysses_comm import as_send_buffer, pack_head_shards, pin_head_layout

BF16 = torch.bfloat16
BANDWIDTH = 4.2e6  # bytes in a microsecond that an H200 was measured to move
TARGET = 550  # TFLOP/s with sinks
BOUND = 8e-3  # relative norm to the plain form: two roundings on both sides
GROUPS = (3430, 250, 22)  # tokens of each modality on a rank that has all of them
TILES = [
    HeadTile(tokens=t, heads=h, num_warps=w)
    for t, h, w in (
        (8, 8, 4),
        (4, 8, 4),
        (4, 24, 4),
        (8, 3, 4),
        (8, 24, 8),
        (16, 4, 8),
        (2, 24, 4),
        (1, 24, 1),
    )
]


class Sizes:
    """Of one rank of eight; small ones where nothing but the interpreter runs."""

    def __init__(self, device: torch.device) -> None:
        gpu = device.type != "cpu"
        self.sequence = 14808 if gpu else 40
        self.tokens = sum(GROUPS) if gpu else 10
        self.groups = GROUPS if gpu else (6, 3, 1)
        self.ranks, self.heads, self.dim = (8, 24, 128) if gpu else (2, 4, 16)
        self.local = self.heads // self.ranks
        self.half = 3 * (self.dim // 8)
        self.tiles = TILES if gpu else TILES[:2]

    @property
    def flops(self) -> float:
        """Of the attention's two products, both sequences."""
        return 2 * 4.0 * self.sequence**2 * self.local * self.dim


def near(expected: torch.Tensor, bound: float = BOUND) -> Callable[[torch.Tensor], None]:
    """Check a relative norm, for results too large to compare element by element in float64."""
    scale = float(expected.float().norm())

    def check(result: torch.Tensor) -> None:
        assert result.shape == expected.shape, f"{result.shape}, expected {expected.shape}"
        error = float((result.float() - expected.float()).norm()) / scale
        assert error < bound, f"relative error {error:.1e}, expected less than {bound:.0e}"

    return check


def usable(candidates: Sequence[Candidate], device: torch.device) -> Iterator[Candidate]:
    """Those that run and are right; says why of the others."""
    for candidate in candidates:
        try:
            harness.check_candidates([candidate], device)
        except Exception as error:
            print(f"  without {candidate.name!r}: {type(error).__name__}: {error}", flush=True)
        else:
            yield candidate


def row(
    case: str,
    device: torch.device,
    shape: Sequence[int],
    nbytes: int,
    candidates: Sequence[Candidate],
    rounds: int,
    floor_is: str,
    floor: Candidate | None = None,
) -> Row:
    """Time what is usable; the first that is counts as ours."""
    ours, *others = usable(candidates, device)
    return harness.run_case(
        "attention",
        case,
        device=device,
        dtype="bfloat16",
        shape=shape,
        nbytes=nbytes,
        ours=ours,
        baselines=others,
        floor=floor,
        floor_is=floor_is,
        checked="relative norm to the plain form",
        rounds=rounds,
    )


def attention_rows(device: torch.device, rounds: int) -> Iterator[Row]:
    """Every backend, on slices of the receive buffer and on dense tensors."""
    sizes = Sizes(device)
    torch.manual_seed(0)
    buffer = torch.randn(2 * sizes.sequence, 3 * sizes.local, sizes.dim, device=device).to(BF16)
    strided = list(buffer.split(sizes.local, dim=1))
    dense = [x.contiguous() for x in strided]
    packed = PackedSequences((0, sizes.sequence, 2 * sizes.sequence))
    sinks = torch.randn(sizes.local, device=device)
    check = near(attend_with_sinks(*strided, packed, sinks, -1.0, "torch"))

    def run(backend: str, tensors: list[torch.Tensor], weigh: str = "torch") -> torch.Tensor:
        return attend_with_sinks(*tensors, packed, sinks, -1.0, backend, weigh)

    def copied(backend: str) -> torch.Tensor:
        return run(backend, [x.contiguous() for x in strided])

    # By name: "auto" takes a kernel only once this benchmark has shown what it is worth.
    ours = "cudnn" if device.type == "cuda" else "auto"
    chosen = choose_attention(ours, *strided, -1.0)
    print(f"{ours} is {chosen.name}: {chosen.reason}", flush=True)
    slow = () if device.type == "cpu" else ("torch",)
    candidates = [
        Candidate(f"{ours}, strided", partial(run, ours, strided), check),
        Candidate(f"{ours}, sinks by triton", partial(run, ours, strided, "triton"), check),
        Candidate(f"{ours}, dense", partial(run, ours, dense), check),
        Candidate(f"{ours}, copied first", partial(copied, ours), check),
        Candidate(f"{ours}, no sinks", partial(_bare, chosen.name, strided, packed), None),
    ]
    for name in ATTENTION_BACKENDS[1:]:
        if name not in (*slow, chosen.name):
            candidates.append(Candidate(f"{name}, strided", partial(run, name, strided), check))
            candidates.append(Candidate(f"{name}, dense", partial(run, name, dense), check))
    shape = [2, sizes.sequence, sizes.local, sizes.dim]
    floor_is = (
        f"{sizes.flops / 1e12:.3f} TFLOP; {TARGET} TFLOP/s = {sizes.flops / TARGET / 1e6:.0f} us"
    )
    nbytes = 4 * dense[0].nbytes
    made = row("attention with sinks", device, shape, nbytes, candidates, rounds, floor_is)
    times = {f"{ours}, strided": made.ours_us, **made.baselines}
    rates = {name: f"{sizes.flops / us / 1e6:.0f} TFLOP/s" for name, us in times.items()}
    harness.print_mapping(f"attention, target {TARGET} TFLOP/s:", rates)
    yield made


def _bare(name: str, tensors: list[torch.Tensor], packed: PackedSequences) -> None:
    """A backend's kernel, alone."""
    from magi2.ops import attention_backends

    if name != "torch":
        for _ in attention_backends._BACKENDS[name].run(*tensors, packed, -1.0):
            pass


def compiled(function: types.FunctionType, *, dynamic: bool) -> Callable[..., Any]:
    """As the model's regions are compiled, with compiled code of its own."""
    copy = types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    options = {"emulate_precision_casts": True}
    made: Callable[..., Any] = torch.compile(copy, fullgraph=True, dynamic=dynamic, options=options)
    return made


def variants(
    device: torch.device, eager: types.FunctionType, arguments: Sequence[Any], check: Any
) -> list[Candidate]:
    """Torch's own: eager, and compiled in both modes; each as a graph."""
    runs: list[tuple[str, Callable[..., Any]]] = [("eager", eager)]
    if device.type != "cpu":
        runs.append(("torch.compile static", compiled(eager, dynamic=False)))
        runs.append(("torch.compile dynamic", compiled(eager, dynamic=True)))
    return [
        Candidate(name, _graph(partial(function, *arguments), device), check)
        for name, function in runs
    ]


def _graph(run: Callable[[], torch.Tensor], device: torch.device) -> Callable[[], torch.Tensor]:
    """Captured at the first call, where a failure is caught and told."""
    replay: list[Callable[[], torch.Tensor]] = []

    def call() -> torch.Tensor:
        if not replay:
            run()
            replay.append(captured(run, device))
        return replay[0]()

    return call


def _tiled(
    device: torch.device,
    tiles: Sequence[HeadTile],
    run: Callable[[HeadTile | None], Any],
    check: Any,
) -> list[Candidate]:
    """Ours as it is cut by default, then cut in each of the ways."""
    named = {f"ours, {t.tokens} x {t.heads}, {t.num_warps} warps": t for t in tiles}
    return [
        Candidate(name, _graph(partial(run, tile), device), check)
        for name, tile in {"ours": None, **named}.items()
    ]


def store_rows(device: torch.device, rounds: int) -> Iterator[Row]:
    """Norms, rotation, cast and pack, for a layer with three weight sets and with one."""
    sizes = Sizes(device)
    heads, ranks, dim = sizes.heads, sizes.ranks, sizes.dim
    qkv = torch.randn(sizes.tokens, 3 * heads * dim, device=device).to(BF16)
    inverse = torch.randperm(sizes.tokens, device=device)
    rotary = torch.randn(sizes.tokens, 2 * sizes.half, device=device)

    def packed(
        qkv: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        inverse: torch.Tensor,
        rotary: torch.Tensor,
    ) -> torch.Tensor:
        if torch.compiler.is_compiling():
            torch._check(qkv.shape[1] == 3 * heads * dim)
            torch._check(rotary.shape[1] == 2 * sizes.half)
        rows = rotated_heads_torch(
            qkv, q_weight, k_weight, sizes.groups, inverse, rotary, heads, heads, 1e-6
        )
        views = pack_head_shards(rows, ranks)
        if torch.compiler.is_compiling():
            return views[0]  # of the one buffer
        buffer = as_send_buffer(views, ranks)
        assert buffer is not None
        return buffer.transpose(0, 1)[:, :, : sizes.local]

    for sets in (1, 3):
        weights = [torch.randn(sets, dim, device=device) * 0.2 for _ in range(2)]
        arguments = (qkv, *weights, inverse, rotary)

        def ours(tile: HeadTile | None, weights: list[torch.Tensor] = weights) -> torch.Tensor:
            send = store_heads_triton(
                qkv, *weights, sizes.groups, inverse, rotary, heads, heads, 1e-6, ranks, tile
            )
            return send.transpose(0, 1)[:, :, : sizes.local]

        check = near(packed(*arguments))
        candidates = _tiled(device, sizes.tiles, ours, check)
        candidates += variants(device, packed, arguments, check)
        target = torch.empty_like(qkv)
        floor = Candidate("copy", partial(target.copy_, qkv))
        nbytes = 2 * qkv.nbytes + rotary.nbytes
        yield row(
            f"norm, rotary, pack, {sets} weight sets",
            device,
            [sizes.tokens, ranks, heads, dim],
            nbytes,
            candidates,
            rounds,
            f"a copy of the rows; at 4.2 TB/s {nbytes / BANDWIDTH:.1f} us",
            floor,
        )


def gate_rows(device: torch.device, rounds: int) -> Iterator[Row]:
    """Gather and gate, from head shards as they are received, and from flat heads."""
    sizes = Sizes(device)
    heads, ranks, dim = sizes.heads, sizes.ranks, sizes.dim
    received = torch.randn(ranks, sizes.tokens, sizes.local, dim, device=device).to(BF16)
    gate = torch.randn(sizes.tokens, heads, device=device).to(BF16)
    permutation = torch.randperm(sizes.tokens, device=device)

    def gated(out: torch.Tensor, permutation: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        pin_head_layout(out, heads, dim, ranks)
        if torch.compiler.is_compiling():
            torch._check(gate.shape[1] == heads)
        return gate_heads_torch(out, permutation, gate)

    shards = received.transpose(0, 1)
    for name, out in (("head shards", shards), ("flat heads", shards.flatten(1, 2))):
        arguments = (out, permutation, gate)

        def ours(tile: HeadTile | None, arguments: tuple[Any, ...] = arguments) -> torch.Tensor:
            return gate_heads_triton(*arguments, tile)

        check = near(gated(*arguments), 1e-3)
        candidates = _tiled(device, sizes.tiles, ours, check)
        candidates += variants(device, gated, arguments, check)
        floor = Candidate("copy", partial(torch.empty_like(received).copy_, received))
        nbytes = 2 * received.nbytes + gate.nbytes
        yield row(
            f"gather and gate, {name}",
            device,
            [sizes.tokens, ranks, heads, dim],
            nbytes,
            candidates,
            rounds,
            f"a copy of the rows; at 4.2 TB/s {nbytes / BANDWIDTH:.1f} us",
            floor,
        )


def weigh_rows(device: torch.device, rounds: int) -> Iterator[Row]:
    """The product with what the sinks leave, of all tokens and a rank's heads."""
    sizes = Sizes(device)
    shape = (2 * sizes.sequence, sizes.local, sizes.dim)
    attended = torch.randn(shape, device=device).to(BF16)
    lse = torch.randn(sizes.local, 2 * sizes.sequence, device=device).t()
    sinks = torch.randn(sizes.local, device=device)
    out = torch.empty_like(attended)

    def three_passes(
        attended: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
    ) -> torch.Tensor:
        weight = sink_weights_torch(lse, sinks).unsqueeze(-1)
        return (attended.float() * weight).to(attended.dtype)

    weight = torch.empty(shape[:2], device=device)

    def in_place() -> torch.Tensor:
        torch.sub(lse, sinks, out=weight)
        return torch.mul(attended, weight.sigmoid_().unsqueeze(-1), out=out)

    def ours(tile: HeadTile | None) -> torch.Tensor:
        weigh_heads_triton(attended, lse, sinks, out, tile)
        return out

    check = near(three_passes(attended, lse, sinks), 1e-3)
    candidates = _tiled(device, sizes.tiles, ours, check)
    candidates.append(Candidate("sub, sigmoid, mul of torch", _graph(in_place, device), check))
    candidates += variants(device, three_passes, (attended, lse, sinks), check)
    floor = Candidate("copy", partial(torch.empty_like(attended).copy_, attended))
    nbytes = 2 * attended.nbytes + lse.nbytes
    floor_is = f"a copy of the rows; at 4.2 TB/s {nbytes / BANDWIDTH:.1f} us"
    yield row("sinks' product", device, shape, nbytes, candidates, rounds, floor_is, floor)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cuda", help="cuda (default) or cpu")
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="folder for the results")
    parser.add_argument("--rounds", type=int, default=30, help="timed calls of each candidate")
    parser.add_argument(
        "--seconds", type=float, default=420.0, help="after which no further group is begun"
    )
    options = parser.parse_args(arguments)
    device = harness.usable_device(options.device)
    end, failed = time.monotonic() + options.seconds, []
    with harness.Results("attention", device, options.out) as results, torch.no_grad():
        for group in (attention_rows, gate_rows, weigh_rows, store_rows):
            if time.monotonic() > end:
                failed.append(f"{group.__name__}: not begun within {options.seconds:.0f} s")
                continue
            # Each in its own attempt: what the others measured is worth having.
            try:
                for made in group(device, options.rounds):
                    results.add(made)
                    print(f"{made.case}: {made.ours_us:.1f} us, floor {made.floor_us}, ", end="")
                    print(made.baselines, flush=True)
            except Exception as error:
                failed.append(f"{group.__name__}: {type(error).__name__}: {error}")
                print(f"{failed[-1]}", flush=True)
        title = f"attention on {harness.device_name(device)}, medians of {options.rounds}"
        for made in results.rows:
            harness.print_table(f"{title}; {made.floor}", *harness.table_of([made]))
        print(f"written to {results.path}")
    if failed:
        raise SystemExit(f"{len(failed)} groups failed: {failed}")


if __name__ == "__main__":
    main()
