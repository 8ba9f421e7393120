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
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from tests.ulysses_comm import transport_cases, transport_faults
from tests.ulysses_comm.transport_cases import (
    CASES,
    TRANSPORTS,
    Report,
    TransportMissingError,
)
from tests.ulysses_comm.transport_faults import FAULTS, describe, judge

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
        *(mark(size, transport, "cuda") for size in WORLDS for transport in TRANSPORTS),
    ],
)
def test_every_exchange_is_right(world_size: int, transport: str, device: str) -> None:
    reports = reports_or_skip(world_size, transport, device)
    assert set(reports) == set(CASES)
    failed = {name: report.problem for name, report in reports.items() if report.problem}
    said = "\n\n".join(f"{name}\n{problem}" for name, problem in failed.items())
    assert not failed, f"{len(failed)} of {len(reports)} cases: {list(failed)}\n{said}"


@pytest.mark.parametrize("world_size", [mark(size) for size in WORLDS])
def test_both_transports_give_the_same_bits(world_size: int) -> None:
    """Sums may come in any order within an exchange of shared heads; elsewhere nothing is added."""
    collective, direct = (
        reports_or_skip(world_size, transport, "cuda") for transport in TRANSPORTS
    )
    differ = [
        name
        for name in CASES
        if name != "attention layer"  # its kernels' sums, not the transport's
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
        *(
            mark(name, WORLDS[-1], transport, "cuda")
            for name, fault in FAULTS.items()
            for transport in fault.transports
        ),
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


def main() -> None:
    """Run all for one world, print what came out at once, and a table at the end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if GPUS > 1 else "cpu")
    parser.add_argument("--transport", nargs="+", choices=TRANSPORTS, default=TRANSPORTS)
    parser.add_argument("--only", choices=["cases", "faults"])
    parser.add_argument("--seconds", type=float, default=540, help="start nothing new after these")
    parser.add_argument("--out", type=Path, help="a JSON lines file of what came out")
    options = parser.parse_args()
    started, lines, failures = time.monotonic(), [], 0
    digests: dict[str, dict[str, tuple[str, ...]]] = {}

    def add(transport: str, name: str, problem: str, seconds: float, note: str = "") -> None:
        nonlocal failures
        failures += bool(problem)
        row = {"world": options.world, "device": options.device, "transport": transport,
               "case": name, "passed": not problem, "problem": problem, "note": note,
               "seconds": round(seconds, 2)}  # fmt: skip
        lines.append(row)
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
        if problem:
            print(f"FAILED {transport}: {name}\n{problem}\n", flush=True)

    for transport in options.transport:
        if options.only != "faults":
            try:
                reports = reports_of(options.world, transport, options.device)
            except TransportMissingError as missing:
                print(f"{transport} is left out: {missing}", flush=True)
                continue
            for name, report in reports.items():
                add(transport, name, report.problem, report.seconds)
                if not report.problem and name != "attention layer":
                    digests.setdefault(name, {})[transport] = report.digests
        for name, fault in FAULTS.items():
            late = time.monotonic() - started > options.seconds
            if options.only == "cases" or transport not in fault.transports or late:
                continue
            start = time.monotonic()
            try:
                outcomes = transport_faults.run_fault(
                    name, options.world, transport, options.device
                )
            except TransportMissingError as missing:
                print(f"{transport} is left out: {missing}", flush=True)
                break
            note = "; ".join(f"rank {o.rank} {describe(o)}" for o in outcomes)
            problem = "\n".join(judge(name, outcomes))
            add(transport, f"fault: {name}", problem, time.monotonic() - start, note)
    for name, of in digests.items():
        if len(of) > 1:
            same = len(set(of.values())) == 1
            add("both", f"same bits: {name}", "" if same else "the digests differ", 0.0)
    for row in lines:
        verdict = "ok" if row["passed"] else "FAILED"
        print(f"{verdict:<7}{row['transport']:<11} {row['seconds']:>7.2f} s  {row['case']}"
              + (f": {row['note']}" if row["note"] else ""))  # fmt: skip
    print(f"W {options.world} on {options.device}: {len(lines)} checks, {failures} failed")
    raise SystemExit(bool(failures))


if __name__ == "__main__":
    main()
