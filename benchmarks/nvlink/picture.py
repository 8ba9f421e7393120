"""Draw how both exchanges grow with the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.nvlink.rows import NvlinkRow

# What is drawn of a case, besides its floor: the best of each kind.
LINES = {
    "permute, concatenate + 1": "permute, concatenate",
    "all-to-all + permute": "all-to-all, permute",
    "ours in place, NCCL": "in place, NCCL",
    "ours as a view, NCCL": "view, NCCL",
    "ours symmetric": "symmetric",
}


def draw_growth(rows: Sequence[NvlinkRow], path: Path) -> Path:
    """Draw time over the number of ranks, one panel for each exchange and number of tokens.

    Args:
        rows: Launched exchanges, of several worlds.
        path: Of the picture; its ending says which kind.

    Raises:
        ImportError: Without matplotlib.
    """
    from matplotlib.figure import Figure

    panels: dict[str, list[NvlinkRow]] = {}
    for row in sorted(rows, key=lambda row: row.world_size):
        panels.setdefault(row.case.rpartition(", W")[0], []).append(row)
    figure = Figure(figsize=(4.2 * len(panels), 3.6), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (title, of_panel) in zip(axes, panels.items(), strict=True):
        worlds = [row.world_size for row in of_panel]
        floors = [row.floor_us or float("nan") for row in of_panel]
        axis.plot(worlds, floors, "k--", label="flat peer copy")
        for name, label in LINES.items():
            times = [row.baselines.get(name, float("nan")) for row in of_panel]
            if any(time == time for time in times):
                axis.plot(worlds, times, "o-", label=label)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("ranks")
        axis.set_xticks(worlds)
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=7)
    axes[0].set_ylabel("microseconds, slowest rank")
    figure.savefig(path, dpi=150)
    return path
