"""What a simulation recorded, rank by rank, in the few numbers that the exchange tests ask for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Call:
    """One collective; every list is in rank order."""

    kind: str
    send_addresses: list[int]
    send_shapes: list[tuple[int, ...]]
    copied_bytes: list[int]
    bytes_by_pair: list[list[int]]  # [source][destination]


def calls_of(simulation: Any) -> list[Call]:
    """Return the collectives of a simulation in order, of all groups."""
    calls = []
    for record in simulation.traffic:
        by_rank = [record.call_of(rank) for rank in record.ranks]
        calls.append(
            Call(
                kind=record.kind,
                send_addresses=[call.buffers[0].data_ptr for call in by_rank],
                send_shapes=[call.buffers[0].shape for call in by_rank],
                copied_bytes=[call.copied_bytes for call in by_rank],
                bytes_by_pair=[list(row) for row in record.sent],
            )
        )
    return calls
