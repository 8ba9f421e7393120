"""Every exchange on GPUs of their own, over NCCL and through symmetric memory: bits and faults.

The cases are those of `transport_cases`, the faults those of `transport_faults`; over gloo the same
ones run here on any machine, which proves the cases. Without pytest, one table:

    python -m tests.ulysses_comm.test_nccl --world 2 --device cuda
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.ulysses_comm import transport_cases, transport_faults
from tests.ulysses_comm.transport_cases import (
    CASES,
    FILES,
    TRANSPORTS,
    Report,
    TransportMissingError,
)
from tests.ulysses_comm.transport_faults import FAULTS, describe, judge
from ulysses_comm import TransportChoice, simulate

KERNELS_OWN = "attention layer"  # the bits of its sums are its kernels', not the transport's
FAULTS_AT_A_TIME = 3

GPUS = torch.cuda.device_count()
WORLDS = [size for size in (2, 4, 8) if size <= GPUS] or [2]

on_gpus = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        GPUS < 2, reason=f"needs 2 CUDA GPUs or more; torch.cuda.device_count() is {GPUS}"
    ),
]


def mark(*values: object, marks: object = on_gpus) -> object:
    return pytest.param(*values, marks=marks)


@functools.cache
def reports_of(world_size: int, transport: str, device: str) -> dict[str, Report]:
    """One start of the processes for all cases."""
    return transport_cases.run_cases(world_size, transport, device)


def reports_or_skip(world_size: int, transport: str, device: str) -> dict[str, Report]:
    try:
        return reports_of(world_size, transport, device)
    except TransportMissingError as missing:
        pytest.skip(f"{transport}: {missing}")


@pytest.mark.parametrize(
    ("world_size", "transport", "device"),
    [
        pytest.param(2, "collective", "cpu", marks=pytest.mark.gloo),
        pytest.param(2, FILES, "cpu", marks=pytest.mark.gloo),
        *(mark(size, transport, "cuda") for size in WORLDS for transport in TRANSPORTS),
    ],
)
def test_every_exchange_is_right(world_size: int, transport: str, device: str) -> None:
    reports = reports_or_skip(world_size, transport, device)
    assert set(reports) == set(CASES)
    failed = {name: report.problem for name, report in reports.items() if report.problem}
    said = "\n\n".join(f"{name}\n{problem}" for name, problem in failed.items())
    assert not failed, f"{len(failed)} of {len(reports)} cases: {list(failed)}\n{said}"


@pytest.mark.parametrize(
    ("world_size", "symmetric", "device"),
    [
        pytest.param(2, FILES, "cpu", marks=pytest.mark.gloo),
        *(mark(size, "symm_mem", "cuda") for size in WORLDS),
    ],
)
def test_both_transports_give_the_same_bits(world_size: int, symmetric: str, device: str) -> None:
    collective = reports_or_skip(world_size, "collective", device)
    direct = reports_or_skip(world_size, symmetric, device)
    differ = [
        name
        for name in CASES
        if name != KERNELS_OWN
        and not collective[name].problem
        and not direct[name].problem
        and collective[name].digests != direct[name].digests
    ]
    assert not differ
    assert any(report.digests for report in direct.values())


@pytest.mark.parametrize(
    ("name", "world_size", "transport", "device"),
    [
        *(
            pytest.param(name, 2, "collective", "cpu", marks=pytest.mark.gloo)
            for name in ("killed", "mismatched", "mismatched and checked")
        ),
        *(mark(name, WORLDS[-1], transport, "cuda") for name in FAULTS for transport in TRANSPORTS),
    ],
)
def test_every_process_ends_in_time(
    name: str, world_size: int, transport: str, device: str
) -> None:
    try:
        outcomes = transport_faults.run_fault(name, world_size, transport, device)
    except TransportMissingError as missing:
        pytest.skip(f"{transport}: {missing}")
    wrong = judge(name, outcomes)
    assert not wrong, "\n".join(wrong)


@pytest.mark.gloo
def test_a_case_that_fails_dies_or_is_alone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the table above is worth: each kind of failure is pinned on its case and no other."""
    names = ["views of one buffer", *BROKEN, "kept workspace"]
    monkeypatch.setattr(transport_cases, "_run_on_rank", _run_broken_on_rank)
    reports = transport_cases.run_cases(
        2, "collective", "cpu", names, patience=timedelta(seconds=2)
    )
    assert not reports["views of one buffer"].problem
    assert not reports["kept workspace"].problem
    assert "rank 1: " in reports["wrong"].problem
    assert "broken on purpose" in reports["wrong"].problem
    assert "rank 1 ended with 7" in reports["dies"].problem


def test_a_refusal_is_no_reason_to_skip_where_the_transport_can_be_used() -> None:
    able = TransportChoice("symm_mem", "2 GPUs")

    def step(group: dist.ProcessGroup) -> str:
        with (
            mock.patch.object(transport_cases, "choice_on_this_machine", return_value=able),
            pytest.raises(RuntimeError, match="cannot use"),
        ):
            transport_cases.use("symm_mem", group)
        return transport_cases.use("symm_mem", group)

    assert "no backend for CUDA" in simulate(2, step).results[0]


BROKEN = ("wrong", "dies")


def _run_broken_on_rank(*args: object) -> None:
    transport_cases.CASES.update({"wrong": _wrong, "dies": _dies})
    _RUN_ON_RANK(*args)


_RUN_ON_RANK = transport_cases._run_on_rank


def _wrong(world: transport_cases.World) -> None:
    assert world.rank == 0, "broken on purpose"


def _dies(world: transport_cases.World) -> None:
    if world.rank == 1:
        import os

        os._exit(7)


class Table:
    """Rows as they come, in memory and in a file, and how many failed."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.rows, self.failures = options, [], 0

    def add(self, transport: str, name: str, problem: str, seconds: float, note: str = "") -> None:
        self.failures += bool(problem)
        row = {"world": self.options.world, "device": self.options.device,
               "transport": transport, "case": name, "passed": not problem, "problem": problem,
               "note": note, "seconds": round(seconds, 2)}  # fmt: skip
        self.rows.append(row)
        if self.options.out:
            self.options.out.parent.mkdir(parents=True, exist_ok=True)
            with self.options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
        if problem:
            print(f"FAILED {transport}: {name}\n{problem}\n", flush=True)

    def print(self) -> None:
        for row in self.rows:
            verdict = "ok" if row["passed"] else "FAILED"
            note = f": {row['note']}" if row["note"] else ""
            what = f"{row['transport']:<11} {row['seconds']:>7.2f} s  {row['case']}{note}"
            print(f"{verdict:<7}{what}")
        world, device = self.options.world, self.options.device
        print(f"W {world} on {device}: {len(self.rows)} checks, {self.failures} failed")


def add_cases(table: Table) -> None:
    """Every case over each transport, then whether the transports gave the same bits."""
    options = table.options
    digests: dict[str, dict[str, tuple[str, ...]]] = {}
    for transport in options.transport:
        try:
            reports = reports_of(options.world, transport, options.device)
        except TransportMissingError as missing:
            print(f"{transport} is left out: {missing}", flush=True)
            continue
        for name, report in reports.items():
            table.add(transport, name, report.problem, report.seconds)
            if not report.problem and name != KERNELS_OWN:
                digests.setdefault(name, {})[transport] = report.digests
    for name, by_transport in digests.items():
        if len(by_transport) > 1:
            same = len(set(by_transport.values())) == 1
            table.add("both", f"same bits: {name}", "" if same else "the digests differ", 0.0)


def add_faults(table: Table, deadline: float) -> None:
    """Every fault over each transport, some at a time: they mostly wait."""
    options = table.options
    chosen = [(name, transport) for transport in options.transport for name in FAULTS]

    def run(name: str, transport: str) -> tuple[str, str, float]:
        start = time.monotonic()
        if start > deadline:
            return "the time was over before it began", "", 0.0
        try:
            outcomes = transport_faults.run_fault(name, options.world, transport, options.device)
        except TransportMissingError as missing:
            return "", f"left out: {missing}", 0.0
        note = "; ".join(f"rank {o.rank} {describe(o)}" for o in outcomes)
        return "\n".join(judge(name, outcomes)), note, time.monotonic() - start

    with ThreadPoolExecutor(FAULTS_AT_A_TIME) as pool:
        pending = [(*case, pool.submit(run, *case)) for case in chosen]
        for name, transport, future in pending:
            problem, note, seconds = future.result()
            table.add(transport, f"fault: {name}", problem and f"{problem}\n{note}", seconds, note)


def main() -> None:
    """Run all for one world, print what failed at once, and a table at the end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--world", type=int, default=2)
    add("--device", choices=["cpu", "cuda"], default="cuda" if GPUS > 1 else "cpu")
    add("--transport", nargs="+", choices=TRANSPORTS, default=TRANSPORTS)
    add("--only", choices=["cases", "faults"])
    add("--seconds", type=float, default=500, help="no fault begins after these, default 500")
    add("--out", type=Path, help="a JSON lines file of what came out")
    options = parser.parse_args()
    table, deadline = Table(options), time.monotonic() + options.seconds
    if options.only != "faults":
        add_cases(table)
    if options.only != "cases":
        add_faults(table, deadline)
    table.print()
    if not table.rows:
        raise SystemExit("nothing was checked: no transport asked for can be used here")
    raise SystemExit(bool(table.failures))


if __name__ == "__main__":
    main()
