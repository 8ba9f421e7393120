"""The traffic record as plain text."""

from __future__ import annotations

from collections.abc import Sequence

from ulysses_comm.simulator.text import dtype_name, format_bytes, ranges
from ulysses_comm.simulator.traffic import CollectiveRecord, Traffic

_HEAD = ("#", "collective", "group", "ranks", "dtype", "sent shape", "remote", "busiest rank",
         "own share", "copied")  # fmt: skip
_LEFT = 6


def traffic_table(traffic: Traffic, *, limit: int | None = None) -> str:
    """Write one line per collective and a sum.

    Columns: `remote` is what went from one rank to another, over all ranks; `busiest rank` the most
    of it that one rank sent; `own share` what ranks sent to themselves; `copied` what this package
    copied outside the collective. A shape in which ranks differ shows the range of each dimension.
    """
    shown = traffic if limit is None else traffic[:limit]
    rows = [_row(position, record) for position, record in enumerate(shown)]
    sums = (
        traffic.remote_bytes,
        max((sum(row) - row[rank] for rank, row in enumerate(traffic.matrix)), default=0),
        sum(record.local_bytes for record in traffic),
        sum(traffic.copied_bytes),
    )
    if len(shown) < len(traffic):
        rows.append(("", f"... {len(traffic) - len(shown)} more", *[""] * (len(_HEAD) - 2)))
    total = ("", f"sum of {len(traffic)}", "", "", "", "", *map(format_bytes, sums))
    return _align([_HEAD, *rows, total], left=_LEFT, rules=(1, len(rows) + 1))


def matrix_table(traffic: Traffic) -> str:
    """Write the bytes from each rank (line) to each rank (column), own shares in brackets."""
    ranks = range(traffic.world_size)
    head = ("from \\ to", *map(str, ranks), "to others")
    rows = [
        (
            str(source),
            *(
                f"[{format_bytes(nbytes)}]" if source == destination else format_bytes(nbytes)
                for destination, nbytes in enumerate(row)
            ),
            format_bytes(sum(row) - row[source]),
        )
        for source, row in enumerate(traffic.matrix)
    ]
    return _align([head, *rows], left=1, rules=(1,))


def _row(position: int, record: CollectiveRecord) -> tuple[str, ...]:
    buffers = [buffer for call in record.calls for buffer in call.buffers]
    dtypes = list(dict.fromkeys(dtype_name(buffer.dtype) for buffer in buffers))
    return (
        str(position),
        record.kind,
        record.group,
        ranges(record.ranks),
        ", ".join(dtypes),
        _shape_text([buffer.shape for buffer in buffers]),
        format_bytes(record.remote_bytes),
        format_bytes(record.largest_remote_bytes),
        format_bytes(record.local_bytes),
        format_bytes(record.copied_bytes),
    )


def _shape_text(shapes: Sequence[tuple[int, ...]]) -> str:
    if not shapes:
        return ""
    if len({len(shape) for shape in shapes}) > 1:
        return "various"
    dims = [
        str(min(sizes)) if min(sizes) == max(sizes) else f"{min(sizes)}..{max(sizes)}"
        for sizes in zip(*shapes, strict=True)
    ]
    return f"({', '.join(dims)})"


def _align(rows: Sequence[Sequence[str]], *, left: int, rules: Sequence[int]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    rule = "  ".join("-" * width for width in widths)
    for place in sorted(rules, reverse=True):
        lines.insert(place, rule)
    return "\n".join(lines)
