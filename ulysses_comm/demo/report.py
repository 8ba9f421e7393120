"""Show what came out: one table of cases, one of promises, and the word PASS or FAIL."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from ulysses_comm.demo.encoder import Passage
from ulysses_comm.demo.judge import STATE_TOLERANCE, Check, Results, Verdict
from ulysses_comm.demo.options import Backend, Plan

# Pipes and CI logs have no width of their own. A terminal of 80 columns has room for all columns of
# the tables, if they stand closer.
LOG_WIDTH, MIN_WIDTH = 120, 80
_ROOMY_WIDTH = 100


def make_console() -> Console:
    """Return a console on stdout that is wide enough for the tables."""
    console = Console(highlight=False)
    least = MIN_WIDTH if console.is_terminal else LOG_WIDTH
    return Console(highlight=False, width=max(console.width, least))


def introduction(passage: Passage, plan: Plan) -> str:
    """Say what is about to run, on one line."""
    real = plan.backend is not Backend.simulate
    where = f"as {plan.backend.value} processes" if real else "simulated in this process"
    return (
        f"all-MiniLM-L6-v2, float32, one text of {passage.seqlen} tokens over "
        f"{', '.join(map(str, plan.group_sizes))} ranks, {where}."
    )


def case_table(verdicts: Sequence[Verdict], width: int) -> Table:
    """One row a case: what travelled, what was copied, how far off the result is.

    Args:
        verdicts: On the cases.
        width: Of the console, in columns.
    """
    table = Table(
        title="Each rank runs its own tokens; attention goes through the exchanges",
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1 if width >= _ROOMY_WIDTH else 0),
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column("ranks", justify="right", no_wrap=True)
    table.add_column("tokens of each rank")
    for header in (
        "all-\nto-\nalls",
        "MiB sent\nby\na rank",
        "\noff\nrank",
        "MiB\ncopied,\npacked",
        "\nin\nplace",
        "max\nerror of\nstate",
        "cosine of\nthe em-\nbedding",
        "\n\ntime",
        "",
    ):
        table.add_column(header, justify="right", no_wrap=True)
    for verdict in verdicts:
        table.add_row(
            str(len(verdict.split_sizes)),
            " ".join(str(size) for size in verdict.split_sizes),
            str(verdict.num_exchanges),
            *_traffic_cells(verdict),
            f"{verdict.state_error:.1e}" if verdict.state_error else "0",
            f"{verdict.cosine:.7f}",
            f"{sum(verdict.seconds.values()):.2f} s",
            "[green]pass[/]" if verdict.passed else "[bold red]FAIL[/]",
        )
    table.caption = (
        "Sent to others and copied by the exchanges, all layers of one run. Time: both layouts, "
        "with hashing; not a benchmark.\n"
        "In place, Q, K and V are stored in send order: here by pack_head_shards, compiled by the "
        "projection itself."
    )
    return table


def promise_table(verdicts: Sequence[Verdict]) -> Table:
    """One row a promise: in how many cases it was kept, and what went wrong where it was not."""
    table = Table(title="Promises", show_header=False, box=SIMPLE_HEAD)
    by_name: dict[str, list[tuple[Verdict, Check]]] = {}
    for verdict in verdicts:
        for check in verdict.checks:
            by_name.setdefault(check.name, []).append((verdict, check))
    for name, entries in by_name.items():
        broken = [(verdict, check) for verdict, check in entries if not check.passed]
        kept = f"{len(entries) - len(broken)} of {len(entries)}"
        table.add_row(name, f"[green]{kept}[/]" if not broken else f"[bold red]{kept}[/]")
        for verdict, check in broken:
            table.add_row(f"  {verdict.split_sizes}: {check.detail}", "")
    return table


def conclusion(results: Results, seconds: float) -> Panel:
    """The word PASS or FAIL, and what it rests on."""
    checks = [check for verdict in results.verdicts for check in verdict.checks]
    broken = sum(not check.passed for check in checks)
    count = len(results.verdicts)
    cases = f"{count} case{'s' * (count != 1)}"
    if results.passed:
        word, reason = "[bold green]PASS[/]", f"{len(checks)} checks in {cases} hold."
    else:
        word = "[bold red]FAIL[/]"
        reason = f"{broken} of {len(checks)} checks in {cases} do not hold."
    scale = (
        f"The state may be off by {STATE_TOLERANCE:.0e}; two halves of the text that exchange "
        f"nothing are off by {results.isolated_error:.1f}."
    )
    return Panel(f"{word}  {reason} {scale} {seconds:.0f} s in all.", expand=False)


def _traffic_cells(verdict: Verdict) -> tuple[str, str, str, str]:
    """Return off-rank bytes, off-rank share and both copies."""
    packed, in_place = verdict.sent["packed"], verdict.sent["in-place"]
    off_rank = [sum(row) - row[rank] for rank, row in enumerate(in_place.bytes)]
    total = sum(sum(row) for row in in_place.bytes)
    return (
        f"{_mebibytes(min(off_rank))}-{_mebibytes(max(off_rank))}",
        f"{sum(off_rank) / total:.0%}",
        _mebibytes(sum(packed.copied)),
        _mebibytes(sum(in_place.copied)),
    )


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.2f}" if count else "0"
