"""The same faults between real gloo processes, where the backend would hang, abort or lie.

With checking on each one is a Python error on every rank within seconds; no process dies.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from tests import faults
from tests.ranks import Outcome, rank_outcomes, run_ranks
from ulysses_comm import RankDisagreementError

pytestmark = pytest.mark.gloo

PATIENCE = timedelta(seconds=2)  # what ranks wait for one that is missing
SECONDS = 1.0  # within which a disagreement is known


def every_fault_in_turn(group: dist.ProcessGroup, validate: Any) -> list[tuple[str, str, float]]:
    """Run all faults, each followed by good exchanges; return (error, text, seconds) of each."""
    reports = []
    for fault in faults.FAULTS:
        dist.barrier(group)
        start = time.monotonic()
        try:
            fault.run(group, validate)
        except (RankDisagreementError, ValueError) as error:
            seconds = time.monotonic() - start
            reports.append((type(error).__name__, str(error), seconds))
        else:
            reports.append(("", f"{fault.name} went unnoticed", 0.0))
        faults.good_exchanges(group, validate)
    return reports


@pytest.mark.parametrize(
    ("validate", "environment", "meet"),
    [
        (True, {}, "file"),
        (PATIENCE, {}, "tcp"),
        (False, {"ULYSSES_COMM_VALIDATE": "1"}, "tcp"),
    ],
    ids=["argument", "argument, TCPStore", "environment, TCPStore"],
)
def test_disagreement_is_one_error_on_all_ranks(
    validate: Any, environment: dict[str, str], meet: str
) -> None:
    by_rank = run_ranks(
        every_fault_in_turn, faults.WORLD, validate, environment=environment, meet=meet
    )
    for index, fault in enumerate(faults.FAULTS):
        reports = [reports[index] for reports in by_rank]
        kind, text, _ = reports.pop(faults.ODD)
        expected = "ValueError" if fault.name in faults.LOCAL else "RankDisagreementError"
        assert kind == expected, f"{fault}: {text}"
        assert {kind for kind, _, _ in reports} == {"RankDisagreementError"}, reports
        texts = {text for _, text, _ in reports}
        if fault.name not in faults.LOCAL:
            texts.add(text)
        assert len(texts) == 1, f"{fault}: ranks tell different stories: {texts}"
        told = texts.pop()
        assert [word for word in fault.words if word not in told] == [], told
        assert f"rank {faults.ODD}" in told
        assert max(seconds for _, _, seconds in reports) < SECONDS, f"{fault}: {reports}"


def leaves(group: dist.ProcessGroup, how: str) -> str:
    """All ranks exchange; then the odd one raises, returns or dies while the others go on."""
    faults.good_exchanges(group, PATIENCE)
    if group.rank() == faults.ODD:
        if how == "raises":
            raise KeyError("the odd rank's own trouble")
        if how == "dies":
            os._exit(7)
        return "left"
    return refusal_of_a_head_scatter(group)


def comes_late(group: dist.ProcessGroup) -> str:
    """The odd rank takes longer than the others wait; afterwards all are of one mind again."""
    faults.good_exchanges(group, PATIENCE)
    if group.rank() == faults.ODD:
        time.sleep(PATIENCE.total_seconds() + 2)
    text = refusal_of_a_head_scatter(group)
    faults.good_exchanges(group, timedelta(seconds=15))
    return text


def refusal_of_a_head_scatter(group: dist.ProcessGroup) -> str:
    start = time.monotonic()
    try:
        faults.head_scatter(group, PATIENCE)
    except RankDisagreementError as error:
        seconds = time.monotonic() - start
        assert seconds < PATIENCE.total_seconds() + SECONDS, f"known after {seconds} s only"
        return str(error)
    return "went unnoticed"


@pytest.mark.parametrize("how", ["raises", "returns", "dies"])
def test_a_rank_that_is_gone_is_named_within_seconds(how: str) -> None:
    outcomes = rank_outcomes(leaves, faults.WORLD, how, timeout=60)
    odd = outcomes.pop(faults.ODD)
    if how == "raises":
        assert odd.error is not None
        assert odd.error.types[0] == "KeyError"
    elif how == "dies":
        assert odd.exit_code == 7
    assert_all_name_the_missing(outcomes)


def assert_all_name_the_missing(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        assert outcome.answered, f"rank {outcome.rank} ended with {outcome.exit_code}"
        assert outcome.error is None, outcome.error
        assert f"rank {faults.ODD}" in outcome.result, outcome.result
    assert len({outcome.result for outcome in outcomes}) == 1, "all ranks tell the same story"


@pytest.mark.parametrize("meet", ["file", "tcp"])
def test_a_rank_that_comes_too_late_hears_that_the_others_gave_up(meet: str) -> None:
    """It must not find everybody's word, agree with it, and then wait alone for ever."""
    assert_all_name_the_missing(rank_outcomes(comes_late, faults.WORLD, timeout=30, meet=meet))


def exchanges_many_times(group: dist.ProcessGroup) -> float:
    for _ in range(30):
        faults.good_exchanges(group, True)
    start = time.monotonic()
    for _ in range(10):
        faults.good_exchanges(group, True)
    return (time.monotonic() - start) / 30


@pytest.mark.parametrize("meet", ["file", "tcp"])
def test_many_checked_exchanges_in_a_row(meet: str) -> None:
    seconds = run_ranks(exchanges_many_times, faults.WORLD, meet=meet)
    assert max(seconds) < 0.5, f"a checked exchange took {max(seconds)} s"
