"""Ways to cut the copy kernel into programs, timed on the layouts that count."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks import harness
from benchmarks.harness import Row
from benchmarks.packs import BF16, CHECKED, FP32, PLAIN_COPY, Layout, Pack
from ulysses_comm.kernels.copies import DEFAULT_TILE, CopyTile, copy_head_shards_triton


def tune(device: torch.device, folder: Path, rounds: int) -> None:
    """Time every way to cut the kernel on the layouts that matter; the best ones come first."""
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


def _tile_name(tile: CopyTile) -> str:
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
