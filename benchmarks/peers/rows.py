"""From the samples of all ranks to rows: medians, and medians of ratios within each round."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Sequence

from benchmarks.peers import ours, plain
from benchmarks.peers.case import Case
from benchmarks.peers.timing import Samples
from benchmarks.peers.way import OUTPUT, QKV, Exchange

TOTAL = "total"
# Which Q/K/V exchange and which output exchange make a total, where the names differ.
_OUR_TOTALS = {
    ours.KEPT: (ours.KEPT, ours.KEPT),
    ours.KEPT_FLAT: (ours.KEPT, ours.KEPT_FLAT),
    ours.IN_PLACE: (ours.IN_PLACE, ours.KEPT),
    ours.DEFAULT: (ours.DEFAULT, ours.DEFAULT),
    ours.DEFAULT_FLAT: (ours.DEFAULT, ours.DEFAULT_FLAT),
}
OURS = tuple(_OUR_TOTALS)
WRITTEN_HERE = (plain.BY_HAND, plain.PLAIN)

Taken = dict[tuple[Exchange, str], list[float]]


@dataclasses.dataclass(frozen=True)
class PeerRow:
    """One exchange, or both, in one case; times in microseconds.

    Attributes:
        bench: "peers".
        device: The machine, without a name.
        exchange: "qkv", "output" or "total": a Q/K/V exchange and an output exchange.
        world_size: Gloo processes, one thread each.
        dtype: Of the data.
        direction: "forward" or "forward and backward".
        split_sizes: Tokens of each rank.
        heads: Of q, k and v each, over all ranks.
        head_dim: Channels of a head.
        rounds: Timed calls of each way.
        us: Median time by way; in each round the slowest rank counts.
        quartiles_us: The spread behind each median.
        cpu_us: Median of the CPU time that all ranks together spend.
        faults: Median of the page faults of all ranks together.
        to_kept: Median over the rounds of way / "ours, kept": above 1, ours is faster.
        to_default: Median over the rounds of way / "ours, no workspace".
        best_peer: The peer with the smallest median, None where no peer runs the case.
        cannot: Why a peer is not in the row.
        checked: How the results were verified.
        versions: What the numbers depend on.
    """

    bench: str
    device: str
    exchange: str
    world_size: int
    dtype: str
    direction: str
    split_sizes: list[int]
    heads: int
    head_dim: int
    rounds: int
    us: dict[str, float]
    quartiles_us: dict[str, list[float]]
    cpu_us: dict[str, float]
    faults: dict[str, float]
    to_kept: dict[str, float]
    to_default: dict[str, float]
    best_peer: str | None
    cannot: dict[str, str]
    checked: str
    versions: dict[str, str]

    @property
    def name(self) -> str:
        splits = "even" if len(set(self.split_sizes)) == 1 else "uneven"
        return f"W {self.world_size} {self.dtype} {splits}, {self.exchange}"


def rows_of(
    case: Case,
    of_ranks: Sequence[Samples],
    *,
    cannot: dict[str, str],
    device: str,
    versions: dict[str, str],
) -> list[PeerRow]:
    """Return the rows of a case: Q/K/V exchange, output exchange, and both.

    Args:
        case: What was exchanged.
        of_ranks: What each rank measured.
        cannot: Why a peer was left out.
        device: Of the rows.
        versions: Of the rows.
    """
    wall = _over_ranks(of_ranks, "wall", max)
    cpu = _over_ranks(of_ranks, "cpu", sum)
    faults = _over_ranks(of_ranks, "faults", sum)
    rows = []
    for exchange in (QKV, OUTPUT, TOTAL):
        walls, cpus = _of_exchange(wall, exchange), _of_exchange(cpu, exchange)
        faulted = _of_exchange(faults, exchange)
        medians = {name: statistics.median(taken) for name, taken in walls.items()}
        peers = [name for name in medians if name not in (*OURS, *WRITTEN_HERE)]
        rows.append(
            PeerRow(
                bench="peers",
                device=device,
                exchange=exchange,
                world_size=case.world_size,
                dtype=case.dtype,
                direction="forward and backward" if case.backward else "forward",
                split_sizes=list(case.split_sizes),
                heads=case.heads,
                head_dim=case.head_dim,
                rounds=len(walls[ours.KEPT]),
                us={name: round(median, 1) for name, median in medians.items()},
                quartiles_us={name: _quartiles(taken) for name, taken in walls.items()},
                cpu_us={name: round(statistics.median(t), 1) for name, t in cpus.items()},
                faults={name: statistics.median(taken) for name, taken in faulted.items()},
                to_kept=_ratios(walls, ours.KEPT),
                to_default=_ratios(walls, ours.DEFAULT),
                best_peer=min(peers, key=lambda name: medians[name], default=None),
                cannot=cannot,
                checked="every bit of every result and gradient on every rank, before the timing",
                versions=versions,
            )
        )
    return rows


def summary(rows: Sequence[PeerRow]) -> tuple[list[str], list[list[str]]]:
    """Header and cells: the time of "ours, kept", then every other way as a ratio to it."""
    names = [*OURS[1:], *WRITTEN_HERE]
    names += list(dict.fromkeys(n for row in rows for n in row.us if n not in (*OURS, *names)))
    header = ["case", "ours, kept\nms", *(name.replace(", ", ",\n") for name in names)]
    header += ["kept / best\npeer", "no workspace /\nbest peer"]
    cells = []
    for row in rows:
        line = [row.name, f"{row.us[ours.KEPT] / 1e3:.2f}"]
        line += [f"{row.to_kept[name]:.2f}" if name in row.to_kept else "" for name in names]
        line += [_against_best(row, row.to_kept), _against_best(row, row.to_default)]
        cells.append(line)
    return header, cells


def _against_best(row: PeerRow, ratios: dict[str, float]) -> str:
    return "" if row.best_peer is None else f"{1 / ratios[row.best_peer]:.2f}"


def markdown(rows: Sequence[PeerRow]) -> str:
    """The same as `summary`, as a table of a Markdown document."""
    header, cells = summary(rows)
    lines = [[cell.replace("\n", " ") for cell in header], ["---"] + ["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [*lines, *cells])


def _over_ranks(
    of_ranks: Sequence[Samples], field: str, reduce: Callable[[Iterable[float]], float]
) -> Taken:
    """Reduce what the ranks measured, round by round."""
    return {
        key: [
            reduce(each) for each in zip(*(getattr(s[key], field) for s in of_ranks), strict=True)
        ]
        for key in of_ranks[0]
    }


def _of_exchange(taken: Taken, exchange: str) -> dict[str, list[float]]:
    if exchange != TOTAL:
        return {name: values for (of, name), values in taken.items() if of == exchange}
    outputs = _of_exchange(taken, OUTPUT)
    qkvs = _of_exchange(taken, QKV)
    others = {name: (name, name) for name in outputs if name not in OURS}
    return {
        name: [a + b for a, b in zip(qkvs[qkv], outputs[output], strict=True)]
        for name, (qkv, output) in {**_OUR_TOTALS, **others}.items()
    }


def _ratios(walls: dict[str, list[float]], to: str) -> dict[str, float]:
    return {
        name: round(statistics.median(a / b for a, b in zip(taken, walls[to], strict=True)), 3)
        for name, taken in walls.items()
    }


def _quartiles(taken: Sequence[float]) -> list[float]:
    if len(taken) < 2:
        return [round(taken[0], 1)] * 2
    low, _, high = statistics.quantiles(taken, n=4)
    return [round(low, 1), round(high, 1)]
