"""What one rank measured of its steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class Part:
    """A kind of work in one step, all its occurrences together.

    Attributes:
        seconds: How long it took.
        count: How often it happened.
        bytes_sent: What this rank sent to others in it; 0 for computing.
    """

    seconds: float
    count: int
    bytes_sent: int = 0


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step of one rank.

    Attributes:
        seconds: From the end of the step before to the end of this one.
        model_seconds: Of it, in the model's call.
        components: Computing inside the call, by name; disjoint.
        exchanges: What was traded with other ranks, waiting for them included, by name; disjoint.
    """

    seconds: float
    model_seconds: float
    components: dict[str, Part]
    exchanges: dict[str, Part]

    @property
    def exchange_seconds(self) -> float:
        """In all exchanges."""
        return sum(part.seconds for part in self.exchanges.values())

    @property
    def computing_seconds(self) -> float:
        """Outside the exchanges."""
        return self.seconds - self.exchange_seconds


def gather_records(records: list[StepRecord]) -> list[list[StepRecord]]:
    """All ranks' records, in rank order, on every rank.

    Every rank of torch.distributed's world must call this; without one, the records are of the lone
    rank.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [records]
    everyone: list[list[StepRecord]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, records)
    return everyone
