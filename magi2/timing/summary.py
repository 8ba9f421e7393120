"""Many ranks' records as the numbers that are compared: maximum over ranks, mean over steps."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from magi2.timing.records import Part, StepRecord

WARM_UP_STEPS = 2  # what is compiled, allocated and chosen once happens in these
OTHER = "guidance, solver and the rest"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class TimingSummary:
    """What a run's steps took.

    Steps are numbered from 0. The first two are left out of every mean, if there are more. A part's
    seconds, like a step's, are those of the slowest rank in each step.

    Attributes:
        num_ranks: Ranks that measured.
        simulated: Whether they took turns in one process: steps and exchanges then hold the other
            ranks' computing, and only computing compares.
        measured_steps: Which steps the means are of.
        step_seconds: Of each step, the slowest rank's.
        fastest_rank_seconds: Of each step, the fastest rank's.
        mean_step_seconds: Over the measured steps.
        mean_computing_seconds: The same without exchanges.
        mean_model_seconds: Of it, in the model's call.
        components: Computing by name, in order of first use.
        exchanges: Exchanges by name; bytes are the most that a rank sends in a step.
    """

    num_ranks: int
    simulated: bool
    measured_steps: list[int]
    step_seconds: list[float]
    fastest_rank_seconds: list[float]
    mean_step_seconds: float
    mean_computing_seconds: float
    mean_model_seconds: float
    components: dict[str, Part]
    exchanges: dict[str, Part]

    def to_json(self) -> str:
        """The whole summary; seconds are in seconds, bytes in bytes."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> TimingSummary:
        """The inverse of `to_json`.

        Raises:
            ValueError: If the text is of another format.
        """
        document = json.loads(text)
        found = document.pop("format", None) if isinstance(document, dict) else None
        if found != FORMAT:
            raise ValueError(f"the summary has format {found!r}: expected {FORMAT}.")
        for kind in ("components", "exchanges"):
            document[kind] = {name: Part(**part) for name, part in document[kind].items()}
        return cls(**document)

    def write(self, path: str | Path) -> Path:
        """Write `to_json` to a file; its folder is made."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_json() + "\n", encoding="utf-8")
        return path


def summarise(ranks: Sequence[Sequence[StepRecord]], *, simulated: bool = False) -> TimingSummary:
    """Put the records of all ranks together.

    Args:
        ranks: For each rank the records of its steps, equally many.
        simulated: Whether the ranks took turns in one process.

    Raises:
        ValueError: If there is no step, or ranks have unequally many.
    """
    counts = {len(records) for records in ranks}
    if len(counts) != 1 or counts == {0}:
        raise ValueError(
            f"the ranks recorded {[len(records) for records in ranks]} steps: expected equally "
            "many of every rank, one or more."
        )
    steps = list(zip(*ranks, strict=True))
    measured = list(range(len(steps)))[WARM_UP_STEPS:] or [len(steps) - 1]

    def mean(value: Callable[[StepRecord], float]) -> float:
        return statistics.fmean(max(value(record) for record in steps[n]) for n in measured)

    kept = [steps[n] for n in measured]
    return TimingSummary(
        num_ranks=len(ranks),
        simulated=simulated,
        measured_steps=measured,
        step_seconds=[max(record.seconds for record in step) for step in steps],
        fastest_rank_seconds=[min(record.seconds for record in step) for step in steps],
        mean_step_seconds=mean(lambda record: record.seconds),
        mean_computing_seconds=mean(lambda record: record.computing_seconds),
        mean_model_seconds=mean(lambda record: record.model_seconds),
        components=_parts([[record.components for record in step] for step in kept])
        | {OTHER: Part(seconds=mean(lambda r: r.seconds - _named_seconds(r)), count=1)},
        exchanges=_parts([[record.exchanges for record in step] for step in kept]),
    )


def _named_seconds(record: StepRecord) -> float:
    return record.exchange_seconds + sum(part.seconds for part in record.components.values())


def _parts(steps: list[list[dict[str, Part]]]) -> dict[str, Part]:
    """Of each name the slowest rank's seconds, mean over steps, and the most bytes and counts."""
    names = dict.fromkeys(name for step in steps for parts in step for name in parts)
    nothing = Part(seconds=0.0, count=0)
    result = {}
    for name in names:
        of_steps = [[parts.get(name, nothing) for parts in step] for step in steps]
        result[name] = Part(
            seconds=statistics.fmean(max(part.seconds for part in step) for step in of_steps),
            count=max(part.count for step in of_steps for part in step),
            bytes_sent=max(part.bytes_sent for step in of_steps for part in step),
        )
    return result
