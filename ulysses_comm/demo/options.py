"""What the options of the demo mean, and which of them contradict each other."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from ulysses_comm.demo.encoder import NUM_HEADS, WEIGHTS_PACKAGE
from ulysses_comm.demo.splits import SPLITS

GROUP_SIZES = tuple(size for size in range(2, NUM_HEADS + 1) if NUM_HEADS % size == 0)
DEFAULT_GROUP_SIZES = (2, 3, 4, 6)
DEFAULT_PROCESSES = 4
PICTURE_SUFFIXES = (".png", ".svg", ".pdf")


class Backend(str, Enum):
    """What carries the exchanges."""

    simulate = "simulate"
    gloo = "gloo"


class OptionError(ValueError):
    """An option that cannot be followed.

    Attributes:
        option: As typed on the command line, for example `--ranks`.
    """

    def __init__(self, option: str, message: str) -> None:
        super().__init__(message)
        self.option = option


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to run.

    Attributes:
        backend: What carries the exchanges.
        group_sizes: Ranks of each run; one entry for real processes.
        split_names: Ways to split the sequence, each with every group size.
        picture: Where to draw the traffic of the largest group, split the first way; None to draw
            nothing.
    """

    backend: Backend
    group_sizes: list[int]
    split_names: list[str]
    picture: Path | None


def make_plan(
    *, backend: Backend, ranks: str | None, nproc: int | None, splits: str, picture: Path | None
) -> Plan:
    """Check the options against each other and against the model, and fill in the defaults.

    Raises:
        OptionError: Names the option, what was given and what was expected.
    """
    if backend is Backend.simulate:
        group_sizes = _simulated_sizes(ranks, nproc)
    else:
        group_sizes = [_process_count(ranks, nproc)]
    if picture is not None and picture.suffix not in PICTURE_SUFFIXES:
        raise OptionError(
            "--picture",
            f"given {str(picture)!r}, expected a file name that ends in one of "
            f"{', '.join(PICTURE_SUFFIXES)}.",
        )
    return Plan(
        backend=backend,
        group_sizes=group_sizes,
        split_names=_split_names(splits),
        picture=picture,
    )


def missing_packages(plan: Plan) -> list[str]:
    """Return the packages that the plan needs and that are not installed."""
    needed = ["transformers", WEIGHTS_PACKAGE] + ["matplotlib"] * (plan.picture is not None)
    return [name for name in needed if importlib.util.find_spec(name) is None]


def launched_by_torchrun() -> bool:
    """Whether a launcher started this process as one rank of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _simulated_sizes(ranks: str | None, nproc: int | None) -> list[int]:
    if nproc is not None:
        raise OptionError(
            "--nproc",
            "starts real processes: add --backend gloo, or use --ranks for simulated ones.",
        )
    if launched_by_torchrun():
        raise OptionError(
            "--backend",
            "a launcher started this process as one rank of several, each of which would simulate "
            "all ranks. Add --backend gloo, or run without the launcher.",
        )
    if ranks is None:
        return list(DEFAULT_GROUP_SIZES)
    words = ranks.replace(",", " ").split()
    if not words or not all(word.isdecimal() for word in words):
        raise OptionError(
            "--ranks", f"given {ranks!r}, expected numbers of ranks, for example --ranks '2 4'."
        )
    return [_checked_size("--ranks", int(word)) for word in words]


def _process_count(ranks: str | None, nproc: int | None) -> int:
    if ranks is not None:
        raise OptionError(
            "--ranks", "is for simulated ranks: with --backend gloo use --nproc, or torchrun."
        )
    if not launched_by_torchrun():
        return _checked_size("--nproc", DEFAULT_PROCESSES if nproc is None else nproc)
    world_size = int(os.environ["WORLD_SIZE"])
    if nproc not in (None, world_size):
        raise OptionError(
            "--nproc", f"given {nproc}, but the launcher started {world_size} ranks: leave it out."
        )
    return _checked_size("the launcher's WORLD_SIZE", world_size)


def _checked_size(option: str, size: int) -> int:
    if size not in GROUP_SIZES:
        raise OptionError(
            option,
            f"given {size}, expected one of {', '.join(map(str, GROUP_SIZES))}: each rank takes "
            f"the same number of the model's {NUM_HEADS} heads.",
        )
    return size


def _split_names(splits: str) -> list[str]:
    names = splits.replace(",", " ").split()
    if not names or any(name not in SPLITS for name in names):
        raise OptionError(
            "--splits", f"given {splits!r}, expected one or more of {', '.join(SPLITS)}."
        )
    return names
