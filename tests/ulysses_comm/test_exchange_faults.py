"""Ranks that disagree, raise or leave, on the simulator: an error at once that says what it was."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import faults
from tests.spy import SpyGroup
from tests.traffic import calls_of
from ulysses_comm import (
    RankDisagreementError,
    scatter_heads_gather_seqlen,
    simulate,
)

every_fault = pytest.mark.parametrize("fault", faults.FAULTS, ids=str)


def failure_of(step: Callable[[dist.ProcessGroup], Any]) -> BaseException:
    """Run a step that must fail and return its error, which must come within a second."""
    start = time.monotonic()
    with pytest.raises(Exception) as caught:  # noqa: PT011  callers check type and text
        simulate(faults.WORLD, step)
    assert time.monotonic() - start < 1, "a simulated fault takes no waiting"
    return caught.value


def words_missing(text: str, words: list[str]) -> list[str]:
    return [word for word in words if word not in text]


@every_fault
def test_disagreement_without_checking_is_reported_by_the_simulator(fault: faults.Fault) -> None:
    if fault.name in faults.AGREE_ON_THE_WIRE:
        # Nothing on the wire differs, so the exchange goes through; only checking can tell.
        simulate(faults.WORLD, lambda group: fault.run(group, False))
        return
    error = failure_of(lambda group: fault.run(group, False))
    if fault.name in faults.LOCAL:
        assert type(error) is ValueError
        assert words_missing(str(error), fault.words[:-1]) == []
        return
    assert isinstance(error, RuntimeError)
    text = str(error)
    assert "rank 1" in text
    assert "all_to_all_single" in text


@every_fault
def test_disagreement_is_one_error_on_all_ranks_when_checked(fault: faults.Fault) -> None:
    def step(group: dist.ProcessGroup) -> tuple[str, str]:
        try:
            fault.run(group, True)
        except (RankDisagreementError, ValueError) as error:
            faults.good_exchanges(group, True)  # and the group is as good as before
            return type(error).__name__, str(error)
        return "", ""

    simulation = simulate(faults.WORLD, step)
    others = [result for rank, result in enumerate(simulation.results) if rank != faults.ODD]
    kind, text = simulation.results[faults.ODD]
    if fault.name in faults.LOCAL:
        assert kind == "ValueError", "the rank at fault says what is wrong with its input"
        assert words_missing(text, fault.words[:-1]) == []
    else:
        assert (kind, text) == others[0]
    assert {kind for kind, _ in others} == {"RankDisagreementError"}
    assert len({text for _, text in others}) == 1, "all ranks tell the same story"
    assert words_missing(others[0][1], fault.words) == []
    assert f"rank {faults.ODD}" in others[0][1]
    # Nothing was sent in vain: what travelled are the three good exchanges.
    assert len(calls_of(simulation)) == 3


def test_the_disagreement_is_a_runtime_error() -> None:
    assert issubclass(RankDisagreementError, RuntimeError)


@pytest.mark.parametrize("validate", [False, True])
def test_a_rank_that_raises_ends_the_run_with_its_own_error(validate: bool) -> None:
    def step(group: dist.ProcessGroup) -> None:
        faults.good_exchanges(group, validate)
        if group.rank() == faults.ODD:
            raise KeyError("the odd rank's own trouble")
        faults.good_exchanges(group, validate)

    error = failure_of(step)
    assert type(error) is KeyError
    assert error.args == ("the odd rank's own trouble",)


@pytest.mark.parametrize("validate", [False, True, timedelta(seconds=60)], ids=str)
@pytest.mark.parametrize("call", [faults.head_scatter, faults.output_exchange])
def test_a_rank_that_leaves_early_is_reported_at_once(
    validate: bool | timedelta, call: Callable[..., Any]
) -> None:
    def step(group: dist.ProcessGroup) -> None:
        faults.good_exchanges(group, validate)
        if group.rank() != faults.ODD:
            call(group, validate)

    text = str(failure_of(step))
    for rank in range(faults.WORLD):
        assert f"rank {rank}" in text or "rank" in text
    assert f"{faults.ODD}" in text
    assert "returned" in text or "did not arrive" in text, text


def test_a_rank_that_calls_another_collective_is_reported() -> None:
    def step(group: dist.ProcessGroup) -> None:
        if group.rank() == faults.ODD:
            dist.barrier(group=group)
        else:
            faults.head_scatter(group, False)

    text = str(failure_of(step))
    assert words_missing(text, ["barrier", "all_to_all_single", "rank 1"]) == []


def test_checking_costs_no_collective() -> None:
    simulation = simulate(faults.WORLD, lambda group: faults.good_exchanges(group, True))
    assert [call.kind for call in calls_of(simulation)] == ["all_to_all_single"] * 3


def test_no_checking_touches_no_store() -> None:
    """A spy's store fails when touched; off must mean off, with the switch at 0 or empty too."""
    for rank in range(faults.WORLD):
        faults.head_scatter(SpyGroup(rank, faults.WORLD), False)
        faults.output_exchange(SpyGroup(rank, faults.WORLD), False)
    with pytest.raises(AssertionError, match="store was touched"):
        faults.head_scatter(SpyGroup(0, faults.WORLD), True)


@pytest.mark.parametrize("value", ["", "0"])
def test_environment_switch_off(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("ULYSSES_COMM_VALIDATE", value)
    faults.head_scatter(SpyGroup(0, faults.WORLD), False)


def test_environment_switch_checks_every_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ULYSSES_COMM_VALIDATE", "1")
    for call in (faults.head_scatter, faults.output_exchange):
        with pytest.raises(AssertionError, match="store was touched"):
            call(SpyGroup(0, faults.WORLD), False)
    simulate(faults.WORLD, lambda group: faults.good_exchanges(group, False))
    fault = next(f for f in faults.FAULTS if f.name in faults.AGREE_ON_THE_WIRE)
    error = failure_of(lambda group: fault.run(group, False))
    assert isinstance(error, RankDisagreementError)


def test_many_checked_exchanges_in_a_row() -> None:
    def step(group: dist.ProcessGroup) -> None:
        for _ in range(20):
            faults.good_exchanges(group, True)

    simulate(faults.WORLD, step)


def test_ranks_may_differ_in_what_does_not_travel() -> None:
    """Layout in memory and input dtypes below the promoted one are each rank's own business."""

    def step(group: dist.ProcessGroup) -> list[torch.Tensor]:
        tokens = faults.SPLITS[group.rank()]
        q = torch.ones(tokens, 6, 8)
        k = torch.ones(tokens, 6, 8, dtype=torch.bfloat16 if group.rank() else torch.float32)
        if group.rank() == 1:
            q = q.unflatten(1, (3, 2))
        if group.rank() == 2:
            k = k.transpose(0, 1).contiguous().transpose(0, 1)
        return scatter_heads_gather_seqlen([q, k], faults.SPLITS, group, validate=True)

    for results in simulate(faults.WORLD, step).results:
        assert all(result.dtype == torch.float32 and (result == 1).all() for result in results)


def test_a_lone_rank_has_nobody_to_ask() -> None:
    results = scatter_heads_gather_seqlen([torch.ones(5, 2, 8)], [5], None, validate=True)
    assert len(results) == 1
    assert scatter_heads_gather_seqlen([torch.ones(5, 2, 8)], [5], SpyGroup(0, 1), validate=True)
