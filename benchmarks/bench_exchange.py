"""What it costs to bring q, k and v into send order, and the attention output back.

    python benchmarks/bench_exchange.py                  # CPU
    python benchmarks/bench_exchange.py --device cuda    # one GPU
    python benchmarks/bench_exchange.py --device cuda --tune   # ways to cut the Triton kernel

The pack is timed as "permute and concatenate" (the plain formulation), as one copy per input, and
as `copy_head_shards` does it: in one launch on a GPU. Head shards that already tile a send buffer
need no pack; the benchmark counts what that launches. Whole exchanges run on simulated ranks.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a bare checkout

from benchmarks import harness
from benchmarks.harness import Candidate, Row
from ulysses_comm.copies import copy_head_shards, copy_head_shards_torch, explain_copy
from ulysses_comm.head_shards import as_send_buffer, flatten_head_shards

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CHECKED = "bits equal permute and concatenate, output poisoned before; in place by address"
PLAIN_COPY = "a plain copy that reads and writes as many bytes, same run"


@dataclasses.dataclass(frozen=True)
class Layout:
    """One pack: `tokens` of this rank, heads per rank and dtype of each input.

    `sources` says where the inputs lie: "separate" tensors, "fused" slices of one projection's
    output, or "heads first" in memory.
    """

    tokens: int
    world_size: int
    heads: tuple[int, ...] = (3, 3, 3)
    dtypes: tuple[torch.dtype, ...] = (BF16, BF16, BF16)
    head_dim: int = 128
    sources: str = "separate"

    @property
    def dtype(self) -> torch.dtype:
        dtype = self.dtypes[0]
        for other in self.dtypes[1:]:
            dtype = torch.promote_types(dtype, other)
        return dtype

    @property
    def name(self) -> str:
        heads = "+".join(map(str, self.heads))
        where = "" if self.sources == "separate" else f", {self.sources}"
        return f"{self.tokens} tokens, W {self.world_size}, {heads} heads{where}"

    @property
    def dtype_name(self) -> str:
        names = [str(dtype).removeprefix("torch.") for dtype in self.dtypes]
        return names[0] if len(set(names)) == 1 else "+".join(names)

    @property
    def shape(self) -> list[int]:
        return [self.tokens, self.world_size, sum(self.heads), self.head_dim]

    @property
    def nbytes(self) -> int:
        """Bytes that a pack reads plus those that it writes."""
        row = self.tokens * self.world_size * self.head_dim
        pairs = zip(self.heads, self.dtypes, strict=True)
        return sum(row * heads * (dtype.itemsize + self.dtype.itemsize) for heads, dtype in pairs)

    def inputs(self, device: torch.device) -> list[torch.Tensor]:
        """Head shards `[S, W, H_i, D]` of random inputs, lying as `sources` says."""
        widths = [self.world_size * heads for heads in self.heads]
        if self.sources == "fused":
            shape = (self.tokens, sum(widths), self.head_dim)
            whole = torch.randn(shape, device=device).to(self.dtypes[0])
            tensors = list(whole.split(widths, dim=1))
        elif self.sources == "heads first":
            tensors = [
                torch.randn((width, self.tokens, self.head_dim), device=device).to(dtype)
                for width, dtype in zip(widths, self.dtypes, strict=True)
            ]
            tensors = [tensor.transpose(0, 1) for tensor in tensors]
        else:
            tensors = [
                torch.randn((self.tokens, width, self.head_dim), device=device).to(dtype)
                for width, dtype in zip(widths, self.dtypes, strict=True)
            ]
        pairs = zip(tensors, self.heads, strict=True)
        return [tensor.unflatten(1, (self.world_size, heads)) for tensor, heads in pairs]


class Pack:
    """The inputs of a layout, a send buffer kept over calls, and the ways to fill one."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        self.device = device
        self.inputs = layout.inputs(device)
        self.send = self.empty()
        self.views = self.split(self.send)
        self.expected = self.permute_and_concatenate()

    def empty(self) -> torch.Tensor:
        tokens, world_size, heads, head_dim = self.layout.shape
        shape = (world_size, tokens, heads, head_dim)
        return torch.empty(shape, dtype=self.layout.dtype, device=self.device)

    def split(self, send: torch.Tensor) -> list[torch.Tensor]:
        return list(send.transpose(0, 1).split(list(self.layout.heads), dim=2))

    def poison(self) -> None:
        self.send.view(torch.uint8).fill_(0xA5)

    def permute_and_concatenate(self, out: torch.Tensor | None = None) -> torch.Tensor:
        permuted = [shard.permute(1, 0, 2, 3).contiguous() for shard in self.inputs]
        return torch.cat(permuted, dim=2, out=out)

    def candidate(self, name: str, run: Callable[[], torch.Tensor]) -> Candidate:
        return Candidate(name, run, harness.expect_bits(self.expected), self.poison)

    def kept(self, copy: Callable[..., None], **options: Any) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            copy(self.views, self.inputs, **options)
            return self.send

        return run

    def fresh(self, copy: Callable[..., None]) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            send = self.empty()
            copy(self.split(send), self.inputs)
            return send

        return run

    def in_place(self) -> Candidate:
        """What head shards that tile a send buffer cost: finding that out."""

        def check(send: torch.Tensor | None) -> None:
            assert send is not None, "the views were not recognised"
            assert send.data_ptr() == self.send.data_ptr(), "the buffer was copied"

        return Candidate(
            "in place", lambda: as_send_buffer(self.views, self.layout.world_size), check
        )

    def plain_copy(self) -> Candidate:
        """The floor: one contiguous copy of as many bytes."""
        half = self.layout.nbytes // 4
        source = torch.randint(-9999, 9999, (half,), dtype=torch.int16, device=self.device)
        target = torch.empty_like(source)
        return Candidate("plain copy", lambda: target.copy_(source), harness.expect_bits(source))


def pack_row(layout: Layout, device: torch.device, rounds: int, *, kept: bool) -> Row:
    """Time the pack of one layout into a buffer kept over calls, or into a fresh one."""
    pack = Pack(layout, device)
    if kept:
        ours = pack.candidate("ours", pack.kept(copy_head_shards))
        one_by_one = pack.candidate("one copy per input", pack.kept(copy_head_shards_torch))
        plain = pack.candidate(
            "permute and concatenate", lambda: pack.permute_and_concatenate(pack.send)
        )
    else:
        ours = pack.candidate("ours", pack.fresh(copy_head_shards))
        one_by_one = pack.candidate("one copy per input", pack.fresh(copy_head_shards_torch))
        plain = pack.candidate("permute and concatenate", pack.permute_and_concatenate)
    # On a CPU ours is one copy per input: timing it twice would only show the noise.
    baselines = [plain, one_by_one] if device.type == "cuda" else [plain]
    return harness.run_case(
        "exchange",
        f"pack, {layout.name}, {'kept' if kept else 'fresh'} buffer",
        device=device,
        dtype=layout.dtype_name,
        shape=layout.shape,
        nbytes=layout.nbytes,
        ours=ours,
        baselines=[*baselines, pack.in_place()],
        floor=pack.plain_copy(),
        floor_is=PLAIN_COPY,
        checked=CHECKED,
        rounds=rounds,
    )


def output_row(layout: Layout, device: torch.device, rounds: int) -> Row:
    """Time the flat output of the second exchange against its view, collective left out."""
    heads = layout.heads[0]
    shape = (layout.world_size, layout.tokens, heads, layout.head_dim)
    received = torch.randn(shape, device=device).to(layout.dtype)
    view = received.transpose(0, 1)
    flat_is = view.reshape(layout.tokens, -1, layout.head_dim)
    plain = torch.empty_like(received)
    ours = Candidate("ours", lambda: received.transpose(0, 1), harness.expect_bits(view))
    flat = Candidate("flat", lambda: flatten_head_shards(view), harness.expect_bits(flat_is))
    return harness.run_case(
        "exchange",
        f"output as a view, {layout.tokens} tokens, W {layout.world_size}, {heads} heads",
        device=device,
        dtype=str(layout.dtype).removeprefix("torch."),
        shape=[layout.tokens, layout.world_size, heads, layout.head_dim],
        nbytes=2 * received.nbytes,
        ours=ours,
        baselines=[
            flat,
            Candidate("plain copy", lambda: plain.copy_(received), harness.expect_bits(received)),
        ],
        floor_is="a view moves nothing; the flat form is bound by the plain copy beside it",
        checked="bits equal the reshaped receive buffer",
        rounds=rounds,
    )


def host_row(layout: Layout, device: torch.device, rounds: int) -> Row:
    """How long a pack keeps the host busy: what counts where the GPU waits for launches."""
    pack = Pack(layout, device)
    return harness.run_case(
        "exchange",
        f"host time of a pack, {layout.name}",
        device=device,
        dtype=layout.dtype_name,
        shape=layout.shape,
        nbytes=layout.nbytes,
        ours=pack.candidate("ours", pack.kept(copy_head_shards)),
        baselines=[
            pack.candidate(
                "permute and concatenate", lambda: pack.permute_and_concatenate(pack.send)
            ),
            pack.candidate("one copy per input", pack.kept(copy_head_shards_torch)),
            pack.in_place(),
        ],
        floor_is="host time, the GPU idle before each call; no measured bound",
        checked=CHECKED,
        rounds=rounds,
        host_clock=True,
    )


def launches(run: Callable[[], Any], device: torch.device) -> list[str]:
    """What one call starts: kernels and fills on a GPU, ops that are no views on a CPU."""
    if device.type == "cuda":
        from torch.profiler import ProfilerActivity, profile

        run()
        harness.synchronize(device)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            run()
            harness.synchronize(device)
        events = profiler.events() or []
        return [event.name for event in events if str(event.device_type).endswith("CUDA")]
    from torch.utils._python_dispatch import TorchDispatchMode

    started: list[str] = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if not func.is_view:
                started.append(str(func))
            return func(*args, **(kwargs or {}))

    with Spy():  # type: ignore[no-untyped-call]
        run()
    return started


def print_launches(layout: Layout, device: torch.device) -> None:
    """Show, and insist on, how many launches each form takes.

    Raises:
        RuntimeError: If the in-place form launches anything or, on a GPU, the pack more than once.
    """
    pack = Pack(layout, device)
    ways = {
        "permute and concatenate": pack.permute_and_concatenate,
        "one copy per input": pack.kept(copy_head_shards_torch),
        "ours": pack.kept(copy_head_shards),
        "in place": pack.in_place().run,
        "output as a view": lambda: pack.send.transpose(0, 1),
    }
    counted = {name: launches(run, device) for name, run in ways.items()}
    harness.print_mapping(
        f"launches, {layout.name} ({explain_copy(pack.views, pack.inputs)})",
        {name: f"{len(started)} {sorted(set(started))}" for name, started in counted.items()},
    )
    if counted["in place"] or counted["output as a view"]:
        raise RuntimeError(f"in place launches {counted['in place']}: expected nothing.")
    if device.type == "cuda" and len(counted["ours"]) != 1:
        raise RuntimeError(f"the pack launches {counted['ours']}: expected one kernel.")


def cases(device: torch.device) -> list[Layout]:
    """The layouts whose pack is timed, sized for the device."""
    mixed = (BF16, FP32, BF16)
    if device.type == "cpu":
        return [
            *(Layout(1024, world, (24 // world,) * 3) for world in (2, 4, 8)),
            Layout(1024, 8, (2, 1, 1)),
            Layout(1024, 8, (1, 3, 2)),
            Layout(1024, 8, (3, 3, 3), mixed),
            Layout(1024, 8, (3, 3, 3), (FP32,) * 3),
            Layout(1024, 8, sources="fused"),
            Layout(1024, 8, sources="heads first"),
            Layout(63, 8),
        ]
    return [
        Layout(3702, 8),
        Layout(3702, 8, (2, 1, 1)),
        Layout(3702, 8, (1, 3, 2)),
        Layout(3702, 8, (3, 3, 3), mixed),
        Layout(3702, 8, (1, 3, 2), mixed),
        Layout(3702, 8, (3, 3, 3), (BF16, FP16, BF16)),
        Layout(3702, 8, (3, 3, 3), (FP32,) * 3),
        Layout(3702, 8, sources="fused"),
        Layout(3702, 8, sources="heads first"),
        Layout(3702, 4, (6, 6, 6)),
        Layout(3702, 2, (12, 12, 12)),
        Layout(16384, 8),
        Layout(16384, 8, (2, 1, 1)),
        Layout(16384, 8, (3, 3, 3), mixed),
        Layout(63, 8),
    ]


def tune(device: torch.device, folder: Path, rounds: int) -> None:
    """Time every way to cut the kernel on the layouts that matter; the best ones come first."""
    from ulysses_comm.kernels.copies import DEFAULT_TILE, CopyTile, copy_head_shards_triton

    tiles = [
        CopyTile(tile_bytes, 2048, num_warps, ranks_first, convert_vec, policy)
        for tile_bytes in (5000, 10000, 20000, 40000)
        for num_warps in (2, 4, 8)
        for ranks_first in (True, False)
        for convert_vec in (4, 8)
        for policy in ("", "evict_first")
    ]
    sweeps = [
        Layout(3702, 8),
        Layout(3702, 8, (2, 1, 1)),
        Layout(3702, 8, (1, 3, 2)),
        Layout(3702, 8, (3, 3, 3), (BF16, FP32, BF16)),
    ]
    with harness.Results("exchange-tune", device, folder) as results:
        for layout in sweeps:
            pack = Pack(layout, device)
            # convert_vec only matters where a dtype changes.
            chosen = [
                tile
                for tile in dict.fromkeys([DEFAULT_TILE, *tiles])
                if tile.convert_vec == DEFAULT_TILE.convert_vec or len(set(layout.dtypes)) > 1
            ]
            ways = [
                pack.candidate(_tile_name(tile), pack.kept(copy_head_shards_triton, tile=tile))
                for tile in chosen
            ]
            row = harness.run_case(
                "exchange-tune",
                f"pack, {layout.name}",
                device=device,
                dtype=layout.dtype_name,
                shape=layout.shape,
                nbytes=layout.nbytes,
                ours=ways[0],
                baselines=ways[1:],
                floor=pack.plain_copy(),
                floor_is=PLAIN_COPY,
                checked=CHECKED,
                rounds=rounds,
            )
            results.add(row)
            _print_best(row, ways[0].name)


def _tile_name(tile: tuple[Any, ...]) -> str:
    return " ".join(map(str, tile)) or "-"


def _print_best(row: Row, default: str) -> None:
    floor = row.floor_us or float("nan")
    ranked = sorted(
        [(row.ours_us, f"{default} (default)")] + [(v, k) for k, v in row.baselines.items()]
    )
    chosen = ranked[:8] + [entry for entry in ranked[8:] if entry[1].endswith("(default)")]
    harness.print_table(
        f"{row.case}, {row.dtype}: plain copy {floor:.2f} us; slowest {ranked[-1][0]:.2f} us",
        ["tile_bytes max_block warps ranks_first convert_vec policy", "us", "x plain copy"],
        [[name, f"{us:.2f}", f"{us / floor:.3f}"] for us, name in chosen],
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda or cuda:1")
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="folder for the results")
    parser.add_argument("--rounds", type=int, help="timed calls of each candidate")
    parser.add_argument("--tune", action="store_true", help="time the kernel's tile shapes instead")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    torch.manual_seed(0)
    on_gpu = device.type == "cuda"
    rounds = options.rounds or (50 if on_gpu else 20)
    if options.tune:
        tune(device, options.out, rounds)
        return
    layouts = cases(device)
    print_launches(layouts[0], device)
    with harness.Results("exchange", device, options.out) as results:
        for layout in layouts:
            results.add(pack_row(layout, device, rounds, kept=True))
            if not on_gpu:
                results.add(pack_row(layout, device, rounds, kept=False))
        for layout in (layouts[0], *([Layout(16384, 8)] if on_gpu else [])):
            results.add(output_row(layout, device, rounds))
        if on_gpu:
            results.add(host_row(Layout(63, 8), device, 4 * rounds))
        harness.print_table(
            f"exchange on {harness.device_name(device)}, medians of {rounds}",
            *harness.table_of(results.rows),
        )
        print(f"written to {results.path}")


if __name__ == "__main__":
    main()
