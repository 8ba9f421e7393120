"""The look of the commands' tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

# A log has no width of its own, and lines of it may be long; a terminal folds what is longer than
# its lines, and every table fits one of 80 columns.
_LOG_WIDTH, _MIN_WIDTH = 120, 80


def make_console() -> Console:
    """A console on standard output that is wide enough for the tables."""
    console = Console(highlight=False)
    least = _MIN_WIDTH if console.is_terminal else _LOG_WIDTH
    return Console(highlight=False, width=max(console.width, least))


def make_table(
    title: str, headers: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str = ""
) -> Table:
    """The first column names, and folds if it must; the others are numbers and never fold.

    A row that starts with "all" is a sum.
    """
    table = Table(
        title=title,
        box=SIMPLE_HEAD,
        title_justify="left",
        caption=caption or None,
        caption_justify="left",
        collapse_padding=True,
        pad_edge=False,
        show_header=any(headers),
    )
    for number, header in enumerate(headers):
        table.add_column(header, justify="right" if number else "left", no_wrap=number > 0)
    for row in rows:
        table.add_row(*row, style="bold" if row[0].startswith("all") else None)
    return table


def gib(nbytes: float) -> str:
    """Memory, as devices count it."""
    if nbytes < 2**20:
        return f"{nbytes / 2**10:,.1f} KiB"
    if nbytes < 2**30:
        return f"{nbytes / 2**20:,.1f} MiB"
    return f"{nbytes / 2**30:,.2f} GiB"


def megabytes(nbytes: float) -> str:
    """Traffic, in millions of bytes."""
    return f"{nbytes / 1e6:,.2f} MB" if nbytes >= 1e4 else f"{nbytes / 1e3:,.2f} kB"


def milliseconds(seconds: float) -> str:
    """Three digits that say something."""
    value = 1e3 * seconds
    return f"{value:,.0f} ms" if value >= 1000 else f"{value:.3g} ms"
