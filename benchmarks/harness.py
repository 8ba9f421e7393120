"""What every benchmark here shares: check first, then time all candidates interleaved, then say it.

A case has one candidate of ours, any number of baselines and, where one exists, a floor: a plain
operation that moves the same bytes, measured in the same run. Nothing is timed before every
candidate has given the right result. Each round calls every candidate once, in an order drawn anew,
so that drifting clocks and a busy machine hit all of them alike; the median over rounds counts. On
a GPU a write of several times the L2 cache precedes every call, outside the timed region.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch

RESULTS = Path(__file__).parent / "results"
FLUSH_BYTES = 512 << 20


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to do the work.

    Attributes:
        name: What the table calls it.
        run: Does the work once; launches on the current stream where the device is a GPU.
        check: Gets what `run` returned, raises AssertionError if it is wrong. None only for work
            without a result, such as a floor.
        prepare: Called before the checked run, to poison outputs that `run` must overwrite.
    """

    name: str
    run: Callable[[], Any]
    check: Callable[[Any], None] | None = None
    prepare: Callable[[], None] | None = None


@dataclasses.dataclass(frozen=True)
class Row:
    """One case as it is written to the results file; times are medians in microseconds.

    `floor` says what bounds the case, `checked` how the results were verified, `bytes` what the
    case reads plus what it writes, `quartiles_us` the spread behind each median.
    """

    bench: str
    case: str
    device: str
    dtype: str
    shape: list[int]
    ours_us: float
    floor_us: float | None
    floor: str
    baselines: dict[str, float]
    checked: str
    versions: dict[str, str]
    bytes: int
    rounds: int
    quartiles_us: dict[str, list[float]]


def expect_bits(expected: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """Return a check that a result has the dtype, shape and every bit of `expected`."""

    def check(result: torch.Tensor) -> None:
        assert result.dtype == expected.dtype, f"{result.dtype}, expected {expected.dtype}"
        assert result.shape == expected.shape, f"{result.shape}, expected {expected.shape}"
        same = torch.equal(_bytes_of(result), _bytes_of(expected))
        assert same, "the bits differ from the expected ones"

    return check


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def check_candidates(candidates: Sequence[Candidate], device: torch.device) -> None:
    """Run and check each candidate once.

    Raises:
        RuntimeError: If a result is wrong; names the candidate. Wrong code is never timed.
    """
    names = [candidate.name for candidate in candidates]
    if len(set(names)) != len(names):
        raise ValueError(f"candidates {names}: expected a name of its own for each.")
    for candidate in candidates:
        if candidate.check is None:
            continue
        if candidate.prepare is not None:
            candidate.prepare()
        result = candidate.run()
        synchronize(device)
        try:
            candidate.check(result)
        except AssertionError as error:
            raise RuntimeError(
                f"{candidate.name!r} is wrong, so it is not timed: {error}"
            ) from error


def time_interleaved(
    candidates: Sequence[Candidate],
    device: torch.device,
    *,
    rounds: int,
    warmup: int = 3,
    seed: int = 0,
    host_clock: bool = False,
) -> dict[str, list[float]]:
    """Time every candidate once per round, each round in a random order.

    `host_clock` measures how long a call keeps the host busy, whatever the GPU still does after.

    Returns:
        The microseconds of every round, by candidate name.
    """
    order = random.Random(seed)
    on_host = host_clock or not _is_gpu(device)
    one_call = _host_call if on_host else _cuda_call
    for _ in range(warmup):
        for candidate in candidates:
            candidate.run()
    synchronize(device)
    samples: dict[str, list[Any]] = {candidate.name: [] for candidate in candidates}
    flush = None if on_host else torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    for _ in range(rounds):
        for candidate in order.sample(list(candidates), len(candidates)):
            samples[candidate.name].append(one_call(candidate.run, flush))
            if host_clock:
                synchronize(device)
        # Once per round, so that the queue of launches stays short.
        synchronize(device)
    return {name: [_microseconds(sample) for sample in taken] for name, taken in samples.items()}


def run_case(
    bench: str,
    case: str,
    *,
    device: torch.device,
    dtype: str,
    shape: Sequence[int],
    nbytes: int,
    ours: Candidate,
    baselines: Sequence[Candidate] = (),
    floor: Candidate | None = None,
    floor_is: str = "nothing to move",
    checked: str,
    rounds: int,
    host_clock: bool = False,
) -> Row:
    """Check all candidates, time them interleaved, and return the row.

    Args:
        bench: Name of the benchmark, the first part of the results file's name.
        case: What distinguishes this row from the others.
        device: Where the candidates run; a CUDA device is timed by events, others by the clock.
        dtype: Of the data, in words ("bfloat16", "bfloat16+float32").
        shape: Of the data; what the dimensions are is the benchmark's business.
        nbytes: Bytes read plus bytes written by the work itself.
        ours: What the ratios are about.
        baselines: What it is compared with.
        floor: A plain operation moving `nbytes`.
        floor_is: What that operation is, or why there is none.
        checked: How the results were verified.
        rounds: Timed calls of each candidate.
        host_clock: Time the host's share of a call instead of the device's.
    """
    candidates = [ours, *baselines, *([floor] if floor else [])]
    check_candidates(candidates, device)
    samples = time_interleaved(candidates, device, rounds=rounds, host_clock=host_clock)
    medians = {name: round(statistics.median(taken), 2) for name, taken in samples.items()}
    return Row(
        bench=bench,
        case=case,
        device=device_name(device),
        dtype=dtype,
        shape=list(shape),
        ours_us=medians[ours.name],
        floor_us=medians[floor.name] if floor else None,
        floor=floor_is,
        baselines={candidate.name: medians[candidate.name] for candidate in baselines},
        checked=checked,
        versions=versions(),
        bytes=nbytes,
        rounds=rounds,
        quartiles_us={name: _quartiles(taken) for name, taken in samples.items()},
    )


class Results:
    """The results file of one benchmark on one device; each row is on disk once it is added."""

    def __init__(
        self, bench: str, device: torch.device, folder: Path = RESULTS, *, suffix: str = ""
    ) -> None:
        """Name the file; `suffix` says what the device's name does not, such as "-x2"."""
        self.path = folder / f"{bench}-{device_name(device)}{suffix}.jsonl"
        self.rows: list[Row] = []
        self._file: IO[str] | None = None

    def add(self, row: Row) -> None:
        """Write the row and keep it for the table."""
        self.rows.append(row)
        if self._file is None:  # not before: a run without a row leaves those of the last one
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("w", encoding="utf-8")
        self._file.write(json.dumps(dataclasses.asdict(row)) + "\n")
        self._file.flush()

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def table_of(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Header and cells: ours, its ratio to the floor, and every baseline with base / ours."""
    names = list(dict.fromkeys(name for row in rows for name in row.baselines))
    header = ["case", "dtype", "MB", "ours us", "floor us", "ours/floor"]
    header += [f"{name}\nus (x ours)" for name in names]
    cells = []
    for row in rows:
        line = [row.case, row.dtype, f"{row.bytes / 1e6:.1f}", f"{row.ours_us:.1f}"]
        if row.floor_us:
            line += [f"{row.floor_us:.1f}", f"{row.ours_us / row.floor_us:.3f}"]
        else:
            line += ["-", "-"]
        for name in names:
            base = row.baselines.get(name)
            line.append("" if base is None else f"{base:.1f} ({_ratio(base, row.ours_us)})")
        cells.append(line)
    return header, cells


def print_table(title: str, header: Sequence[str], cells: Sequence[Sequence[str]]) -> None:
    """Print with rich where it is installed, in plain columns otherwise; no line is folded."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(title)
        lines = [[name.replace("\n", " ") for name in header], *cells]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))
        return
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index < 2 else "right", no_wrap=True)
    for line in cells:
        table.add_row(*line)
    # Room for every column, however narrow the terminal or pipe: a cut number is worth nothing.
    Console(width=Console(width=10_000).measure(table).maximum).print(table)


def usable_device(name: str) -> torch.device:
    """Return the device of `--device`, or end the program with what to do where there is none."""
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit(
            f"--device {name}: torch {torch.__version__} sees no CUDA GPU here. Run on a machine "
            "that has one; --help says what --device cpu does."
        )
    return device


def device_name(device: torch.device) -> str:
    """A name without a host in it: "nvidia-h200", "cpu-2core"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device).lower().replace(" ", "-")
    if device.type == "cpu":
        return f"cpu-{os.cpu_count()}core"
    return device.type


def versions() -> dict[str, str]:
    """What the numbers depend on beside the device."""
    found = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cpu_threads": str(torch.get_num_threads()),
    }
    try:
        import triton

        found["triton"] = str(triton.__version__)
    except ImportError:
        pass
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return found


def synchronize(device: torch.device) -> None:
    """Wait for the device, if it is one that runs on its own."""
    if _is_gpu(device):
        torch.get_device_module(device).synchronize(device)


def _is_gpu(device: torch.device) -> bool:
    return device.type in ("cuda", "musa")


def _cuda_call(run: Callable[[], Any], flush: torch.Tensor | None) -> Any:
    assert flush is not None
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # The flush keeps the GPU busy for longer than the host needs to queue what follows.
    flush.zero_()
    start.record()
    run()
    end.record()
    return start, end


def _host_call(run: Callable[[], Any], flush: torch.Tensor | None) -> float:
    start = time.perf_counter_ns()
    run()
    return (time.perf_counter_ns() - start) / 1e3


def _microseconds(sample: Any) -> float:
    if isinstance(sample, float):
        return sample
    start, end = sample
    return float(start.elapsed_time(end)) * 1e3


def _quartiles(taken: Sequence[float]) -> list[float]:
    if len(taken) < 2:
        return [round(taken[0], 2)] * 2
    low, _, high = statistics.quantiles(taken, n=4)
    return [round(low, 2), round(high, 2)]


def _ratio(base: float, ours: float) -> str:
    return f"{base / ours:.2f}x" if ours else "-"


def print_mapping(title: str, values: Mapping[str, object]) -> None:
    """Print facts that go with a table, one a line."""
    print(title)
    for name, value in values.items():
        print(f"  {name}: {value}")
