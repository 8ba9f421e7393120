"""The traffic record as a picture; needs matplotlib, which the extra `viz` installs."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ulysses_comm.simulator.text import format_bytes
from ulysses_comm.simulator.traffic import Traffic

# Numbers in the cells stay readable up to here; above, the colours and the sums speak alone.
_MAX_WRITTEN_RANKS = 12
_COLOURS = "Blues"
_BAR = "#4a7fb5"
_TEXT = "#202020"
_FAINT = "#707070"
# Inches: left and top margin, gap between the map and the bars, length of the bars, their labels.
_LEFT, _TOP, _GAP, _BARS, _LABELS = 0.75, 1.4, 0.15, 1.2, 0.75

Matrix = Sequence[Sequence[int]]


def draw_traffic(
    traffic: Traffic, path: str | os.PathLike[str], *, title: str | None = None
) -> None:
    """Draw who sent how much to whom: a heat map, and beside it what each rank sent and received.

    What a rank sent to itself is hatched and counts in no sum, since it crosses no link.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ModuleNotFoundError(
            "drawing the traffic needs matplotlib: pip install 'ulysses-comm[viz]'"
        ) from error

    matrix = traffic.matrix
    remote = [[0 if s == d else n for d, n in enumerate(row)] for s, row in enumerate(matrix)]
    side = min(max(3.6, 0.8 * traffic.world_size), 8.0)
    out = [sum(row) for row in remote]
    into = [sum(column) for column in zip(*remote, strict=True)]
    largest = max(*out, *into, 1)
    # Both kinds of bars have one scale, so the lower ones may need less room.
    lower = max(0.3, _BARS * max(into) / largest)
    width, height = _LEFT + side + _GAP + _BARS + _LABELS, _TOP + side + _GAP + lower + 0.4
    # A figure of its own, not pyplot's: no global state, no window, any thread.
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)

    def place(left: float, top: float, across: float, down: float) -> Any:
        box = (left / width, 1 - (top + down) / height, across / width, down / height)
        return figure.add_axes(box)

    _draw_map(place(_LEFT, _TOP, side, side), matrix, remote)
    sent = place(_LEFT + side + _GAP, _TOP, _BARS, side)
    received = place(_LEFT, _TOP + side + _GAP, side, lower)
    _draw_sums(sent, received, out, into)
    sent.set_xlim(0, largest)
    received.set_ylim(largest * lower / _BARS, 0)
    lines = [title or "Bytes from rank to rank", *_summary(traffic)]
    for i, line in enumerate(lines):
        figure.text(
            0.15 / width,
            1 - (0.18 + (0.1 + 0.2 * i if i else 0)) / height,
            line,
            va="top",
            fontsize=9 if i else 12,
            color=_FAINT if i else _TEXT,
        )
    figure.savefig(os.fspath(path), dpi=150)


def _draw_map(axes: Any, matrix: Matrix, remote: Matrix) -> None:
    from matplotlib.patches import Rectangle

    size = len(matrix)
    largest = max(map(max, remote)) or 1
    edges = [rank - 0.5 for rank in range(size + 1)]
    gap = 1.5 if size <= 16 else 0.3
    axes.pcolormesh(
        edges, edges, remote, cmap=_COLOURS, vmin=0, vmax=largest, edgecolor="white", linewidth=gap
    )
    for rank in range(size):
        corner = (rank - 0.5, rank - 0.5)
        axes.add_patch(Rectangle(corner, 1, 1, fc="#f6f6f6", ec="#d8d8d8", hatch="///", lw=0))
    if size <= _MAX_WRITTEN_RANKS:
        _write_values(axes, matrix, largest)
    step = max(1, size // 16)
    marks = list(range(0, size, step))
    axes.set_xticks(marks, list(map(str, marks)), fontsize=9)
    axes.set_yticks(marks, list(map(str, marks)), fontsize=9)
    axes.set_xlabel("to rank")
    axes.set_ylabel("from rank")
    axes.invert_yaxis()
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    _strip(axes)


def _write_values(axes: Any, matrix: Matrix, largest: int) -> None:
    for source, row in enumerate(matrix):
        for destination, nbytes in enumerate(row):
            own = source == destination
            axes.text(
                destination,
                source,
                format_bytes(nbytes).replace(" ", "\n"),
                ha="center",
                va="center",
                fontsize=8,
                color=_FAINT if own else "white" if nbytes > 0.55 * largest else _TEXT,
                bbox={"fc": "#f6f6f6", "ec": "none", "pad": 1} if own else None,
            )


def _draw_sums(sent: Any, received: Any, out: Sequence[int], into: Sequence[int]) -> None:
    ranks = range(len(out))
    sent.barh(ranks, out, color=_BAR, height=0.7)
    received.bar(ranks, into, color=_BAR, width=0.7)
    sent.set_ylim(len(out) - 0.5, -0.5)
    received.set_xlim(-0.5, len(into) - 0.5)
    # Many ranks leave no room for a label each: then only the largest is written.
    every = len(out) <= _MAX_WRITTEN_RANKS
    style = {"fontsize": 8, "color": _TEXT, "textcoords": "offset points"}
    for rank in ranks:
        if every or rank == out.index(max(out)):
            text = format_bytes(out[rank])
            sent.annotate(text, (out[rank], rank), (3, 0), va="center", **style)
        if every or rank == into.index(max(into)):
            text = format_bytes(into[rank])
            received.annotate(text, (rank, into[rank]), (0, -3), ha="center", va="top", **style)
    sent.set_title("sent to others", fontsize=9, loc="left", color=_TEXT)
    received.text(
        -0.01, 1, "received", fontsize=9, ha="right", va="top", transform=received.transAxes
    )
    for axes in (sent, received):
        axes.set_xticks([])
        axes.set_yticks([])
        _strip(axes)


def _strip(axes: Any) -> None:
    axes.tick_params(length=0)
    for side in ("top", "right", "bottom", "left"):
        axes.spines[side].set_visible(False)


def _summary(traffic: Traffic) -> list[str]:
    kinds = Counter(record.kind for record in traffic)
    calls = ", ".join(f"{count} x {kind}" for kind, count in kinds.most_common(3))
    return [
        f"{traffic.world_size} ranks; {calls or 'nothing sent'}{', ...' if len(kinds) > 3 else ''}",
        f"{format_bytes(traffic.remote_bytes)} between ranks (hatched: a rank's own share, not "
        f"counted); {format_bytes(sum(traffic.copied_bytes))} copied locally",
    ]
