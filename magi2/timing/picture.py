"""A run's steps as a picture; needs matplotlib, which the extra `pipeline` installs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from magi2.extras import require
from magi2.timing.summary import TimingSummary

_COMPUTING, _EXCHANGE, _FAINT, _TEXT = "#4a7fb5", "#d98b3a", "#b9cfe4", "#202020"


def draw_summary(summary: TimingSummary, path: str | Path, *, title: str = "") -> Path:
    """Draw the time of each step, and what a step is made of.

    Args:
        summary: Of a run.
        path: A PNG; its folder is made.
        title: What was measured, above the picture.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    figure_class = require("matplotlib.figure", "drawing the steps").Figure
    canvas = require("matplotlib.backends.backend_agg", "drawing the steps").FigureCanvasAgg
    rows = len(summary.components) + len(summary.exchanges)
    figure = figure_class(figsize=(11, max(3.4, 1.5 + 0.3 * rows)), layout="constrained")
    canvas(figure)  # not pyplot's: no global state, no window
    steps, parts = figure.subplots(1, 2, width_ratios=(1, 1.15))
    _draw_steps(steps, summary)
    _draw_parts(parts, summary)
    if title:
        figure.suptitle(title, fontsize=11, color=_TEXT)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def _draw_steps(axes: Any, summary: TimingSummary) -> None:
    numbers = range(len(summary.step_seconds))
    slow = [1e3 * seconds for seconds in summary.step_seconds]
    fast = [1e3 * seconds for seconds in summary.fastest_rank_seconds]
    warm_up = summary.measured_steps[0]
    if warm_up:
        axes.axvspan(-0.5, warm_up - 0.5, color="#eeeeee", label="left out of the mean")
    if summary.num_ranks > 1:
        axes.fill_between(numbers, fast, slow, color=_FAINT, label="down to the fastest rank")
    label = "slowest rank" if summary.num_ranks > 1 else "step"
    axes.plot(numbers, slow, color=_COMPUTING, marker="o", markersize=3, label=label)
    mean = 1e3 * summary.mean_step_seconds
    axes.axhline(mean, color=_EXCHANGE, linestyle="--", label=f"mean {mean:.4g} ms")
    axes.set(xlabel="step", ylabel="ms", xlim=(-0.5, len(slow) - 0.5))
    # Compiling may take a thousand steps' time: the others would be one flat line.
    if max(slow) > 5 * mean:
        axes.set_yscale("log")
        formatter = require("matplotlib.ticker", "drawing the steps").LogFormatter
        axes.yaxis.set_major_formatter(formatter())  # plain numbers rather than powers of ten
        axes.yaxis.set_minor_formatter(formatter(minor_thresholds=(2, 0.5)))
    else:
        axes.set_ylim(bottom=0, top=1.25 * max(slow))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, fontsize=8)
    axes.set_title("time of each step", fontsize=10)


def _draw_parts(axes: Any, summary: TimingSummary) -> None:
    parts = [(name, part, _COMPUTING) for name, part in summary.components.items()]
    parts += [(name, part, _EXCHANGE) for name, part in summary.exchanges.items()]
    parts.sort(key=lambda entry: entry[1].seconds)
    milliseconds = [1e3 * part.seconds for _, part, _ in parts]
    bars = axes.barh([name for name, _, _ in parts], milliseconds, color=[c for *_, c in parts])
    labels = [
        f"{ms:.3g} ms" + (f", {_bytes(part.bytes_sent)}" if part.bytes_sent else "")
        for ms, (_, part, _) in zip(milliseconds, parts, strict=True)
    ]
    axes.bar_label(bars, labels, padding=4, fontsize=8, color=_TEXT)
    axes.set_xlim(right=1.35 * max(milliseconds, default=1.0))
    axes.set_xlabel("ms in a step, slowest rank")
    axes.tick_params(axis="y", labelsize=9, length=0)
    axes.spines[["top", "right"]].set_visible(False)
    title = "computing (blue) and exchanges (orange)" if summary.exchanges else "computing"
    if summary.simulated and summary.exchanges:
        title += "\nsimulated: exchanges hold the other ranks' computing"
    axes.set_title(title, fontsize=10)


def _bytes(number: int) -> str:
    return f"{number / 1e6:.3g} MB" if number >= 1e5 else f"{number / 1e3:.3g} kB"
