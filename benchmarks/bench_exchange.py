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
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from a bare checkout

from benchmarks import harness
from benchmarks.harness import Candidate, Row
from benchmarks.packs import BF16, CHECKED, FP16, FP32, PLAIN_COPY, Layout, Pack
from ulysses_comm import flatten_head_shards
from ulysses_comm.copies import copy_head_shards, copy_head_shards_torch, explain_copy


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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda or cuda:1")
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="folder for the results")
    parser.add_argument("--rounds", type=int, help="timed calls of each candidate")
    parser.add_argument("--tune", action="store_true", help="time the kernel's tile shapes instead")
    # One thread by default: with as many threads as cores, one busy neighbour stalls every copy.
    parser.add_argument("--threads", type=int, default=1, help="torch's CPU threads, default 1")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    device = harness.usable_device(options.device)
    torch.manual_seed(0)
    on_gpu = device.type == "cuda"
    rounds = options.rounds or (50 if on_gpu else 20)
    if options.tune:
        # Not imported above: it needs Triton.
        from benchmarks.tune_copies import tune

        tune(device, options.out, rounds)
        return
    layouts = cases(device)
    with harness.Results("exchange", device, options.out) as results:
        for layout in layouts:
            results.add(pack_row(layout, device, rounds, kept=True))
            if not on_gpu:
                results.add(pack_row(layout, device, rounds, kept=False))
        for layout in (layouts[0], *([Layout(16384, 8)] if on_gpu else [])):
            results.add(output_row(layout, device, rounds))
        if on_gpu:
            results.add(host_row(Layout(63, 8), device, 4 * rounds))
        else:
            # Simulated ranks take turns on the host, which would be all that a GPU shows.
            from benchmarks.worlds import output_exchange_row, qkv_exchange_row

            for world_size in (2, 4, 8):
                layout = Layout(1024, world_size, (24 // world_size,) * 3)
                results.add(qkv_exchange_row(layout, device, rounds))
                results.add(output_exchange_row(layout, device, rounds))
        harness.print_table(
            f"exchange on {harness.device_name(device)}, medians of {rounds}",
            *harness.table_of(results.rows),
        )
        print(f"written to {results.path}")
    print_launches(layouts[0], device)


if __name__ == "__main__":
    main()
