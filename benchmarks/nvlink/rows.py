"""Rows of the results file, and the tables made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.harness import Row

# Time over the flat peer copy that an exchange should keep to, and the share that should hide.
RATIO_TARGETS = {16384: 1.15, 3702: 1.3}
HIDDEN_TARGET = 0.8

# How the cases begin that are more than an exchange: the ratio's target is not theirs.
EPILOGUE = "norms, rotation and exchange"


@dataclass(frozen=True)
class NvlinkRow(Row):
    """One case. `baselines` holds every candidate, `ours_us` the time of the one in `ours`.

    Attributes:
        world_size: Ranks.
        ours: The candidate that the row's ratios are about.
        predicted_us: What the cost model says of the exchange at data-sheet rates.
        hidden: For each candidate that overlaps, the share of the exchange that costs nothing.
        notes: What else is to be said of how much hides, by candidate.
        left_out: Why candidates are missing, by name.
    """

    world_size: int = 0
    ours: str = ""
    predicted_us: float | None = None
    hidden: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


def table_of_row(row: NvlinkRow) -> tuple[str, list[str], list[list[str]]]:
    """Title, header and cells: each candidate's time, its ratio to the floor, the link's rate."""
    overlaps = bool(row.hidden)
    header = ["candidate", "us", "middle half", f"x {row.floor}",
              "of the exchange hidden" if overlaps else "GB/s sent"]  # fmt: skip
    cells = []
    candidates = dict(row.baselines)
    if row.floor_us:
        candidates[row.floor] = row.floor_us
    for name, us in candidates.items():
        low, high = row.quartiles_us[name]
        ratio = f"{us / row.floor_us:.2f}" if row.floor_us else "-"
        last = f"{row.bytes / us / 1e3:.0f}"
        if overlaps:
            share = [f"{row.hidden[name]:.0%}"] if name in row.hidden else []
            last = ", ".join(share + ([row.notes[name]] if name in row.notes else []))
        cells.append([name, f"{us:.1f}", f"{low:.1f} to {high:.1f}", ratio, last])
    return title_of(row), header, cells


def title_of(row: NvlinkRow) -> str:
    """The case, what was said about it beforehand, and whether the target is met."""
    title = f"{row.case}; {row.bytes / 1e6:.1f} MB leave a rank; {row.rounds} rounds"
    if row.predicted_us:
        title += f"; the cost model predicts {row.predicted_us:.0f} us"
    tokens = row.shape[0]
    if row.hidden:
        best = max(row.hidden, key=lambda name: row.hidden[name])
        title += f"; best hidden: {best}, {row.hidden[best]:.0%} (target {HIDDEN_TARGET:.0%})"
    elif row.floor_us and tokens in RATIO_TARGETS and not row.case.startswith(EPILOGUE):
        ratio = row.ours_us / row.floor_us
        title += f"; {row.ours}: {ratio:.2f} x the floor (target {RATIO_TARGETS[tokens]})"
    return title


def markdown(rows: Sequence[NvlinkRow]) -> str:
    """All rows as Markdown tables, with what they were measured on."""
    parts = []
    for row in rows:
        title, header, cells = table_of_row(row)
        lines = [header, ["---"] + ["---:"] * (len(header) - 1), *cells]
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        missing = "".join(f"\n- left out: {name}: {why}" for name, why in row.left_out.items())
        parts.append(f"**{title}**\n\n{table}\n{missing}")
    if rows:
        said = ", ".join(f"{name} {value}" for name, value in rows[0].versions.items())
        parts.append(f"{rows[0].device} x {rows[0].world_size}; {said}.")
    return "\n\n".join(parts)
