"""Comparing each layout once: what a steady loop pays, and what ranks with other memories do."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
import torch

from tests.ranks import rank_outcomes
from tests.spy import SpyGroup
from ulysses_comm import (
    Agreement,
    DeadlockError,
    RankDisagreementError,
    scatter_heads_gather_seqlen,
    scatter_seqlen_gather_heads,
    simulate,
)

SPLITS = [2, 0, 1]
WORLD = len(SPLITS)


class CountingStore:
    """Passes on to a group's store and counts what is asked of it."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.counts: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.counts[name] += 1
        return getattr(self._store, name)


def exchange(group: Any, validate: Any, heads: int = 1) -> None:
    rank = group.rank()
    mine = torch.arange(SPLITS[rank] * WORLD * heads * 4.0).view(SPLITS[rank], WORLD * heads, 4)
    (whole,) = scatter_heads_gather_seqlen([mine], SPLITS, group, validate=validate)
    back = scatter_seqlen_gather_heads(whole.contiguous(), SPLITS, group, validate=validate)
    assert torch.equal(back, mine)


def test_a_steady_loop_asks_the_store_nothing() -> None:
    def step(group: Any) -> tuple[int, int]:
        group._store = store = CountingStore(group.get_group_store())
        agreement = Agreement()
        exchange(group, agreement)
        first = store.counts.total()
        for _ in range(5):
            exchange(group, agreement)
        return first, store.counts.total() - first

    for first, later in simulate(WORLD, step).results:
        assert first > 0
        assert later == 0


def test_every_call_is_compared_without_an_agreement() -> None:
    def step(group: Any) -> list[int]:
        group._store = store = CountingStore(group.get_group_store())
        asked = []
        for _ in range(3):
            before = store.counts["set"]
            exchange(group, True)
            asked.append(store.counts["set"] - before)
        return asked

    for asked in simulate(WORLD, step).results:
        assert min(asked) >= 2  # each of the two exchanges posts


@pytest.mark.parametrize("forgetful", range(WORLD))
@pytest.mark.parametrize("how", ["new object", "cleared", "every call"])
def test_ranks_with_other_memories_take_the_same_path(forgetful: int, how: str) -> None:
    """What was agreed on stands in the store, so nobody waits for ranks that no longer ask."""

    def step(group: Any) -> None:
        agreement = Agreement()
        exchange(group, agreement)
        for _ in range(3):
            if group.rank() == forgetful and how == "new object":
                agreement = Agreement()
            if group.rank() == forgetful and how == "cleared":
                agreement.clear()
            exchange(group, agreement)
        exchange(group, agreement, heads=2)

    if how == "every call":
        with pytest.raises(DeadlockError):  # it asks ranks that have agreed to ask no more
            simulate(WORLD, lambda group: mixed(group, forgetful))
    else:
        simulate(WORLD, step)


def mixed(group: Any, forgetful: int) -> None:
    agreement = Agreement()
    exchange(group, agreement)
    exchange(group, True if group.rank() == forgetful else agreement)


def disagree(group: Any) -> None:
    """Agree on one layout, then on another one that rank 1 gets wrong."""
    agreement = Agreement(timedelta(seconds=5))
    exchange(group, agreement)
    mine = torch.ones(SPLITS[group.rank()], 2 * WORLD, 4)
    heads = mine.to(torch.bfloat16) if group.rank() == 1 else mine
    scatter_heads_gather_seqlen([heads], SPLITS, group, validate=agreement)


@pytest.mark.gloo
def test_a_new_layout_that_ranks_see_differently_is_one_error_on_all() -> None:
    outcomes = rank_outcomes(disagree, WORLD, timeout=60)
    texts = {outcome.error.message for outcome in outcomes if outcome.error}
    assert len(texts) == 1
    assert all(outcome.error.types[0] == "RankDisagreementError" for outcome in outcomes)
    assert "bfloat16" in texts.pop()
    assert max(outcome.seconds for outcome in outcomes) < 5


def strays(group: Any) -> None:
    """Rank 1 alone turns to a layout that is new, the others to one that all know."""
    agreement = Agreement(timedelta(seconds=2))
    exchange(group, agreement)
    exchange(group, agreement, heads=2 if group.rank() == 1 else 1)


@pytest.mark.gloo
def test_a_rank_that_strays_from_a_known_layout_ends_everybody() -> None:
    """It hears in time that nobody joined it; the others lose it in the collective."""
    outcomes = rank_outcomes(strays, WORLD, timeout=60)
    stray = outcomes.pop(1)
    assert stray.error is not None
    assert stray.error.types[0] == "RankDisagreementError"
    assert "ranks 0, 2" in stray.error.message
    assert all(outcome.answered and outcome.error is not None for outcome in outcomes)


def test_what_is_no_way_to_validate_is_refused() -> None:
    group = SpyGroup(0, WORLD)
    for validate in ("no", 0.5, 5, None, 1):
        with pytest.raises(ValueError, match=r"validate=.*expected True, False"):
            exchange(group, validate)


@pytest.mark.parametrize("value", ["", "0", "false", "No", "off"])
def test_the_environment_can_say_no(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ULYSSES_COMM_VALIDATE", value)
    group = SpyGroup(0, WORLD)  # it raises if its store is touched
    mine = torch.ones(SPLITS[0], WORLD, 4)
    scatter_heads_gather_seqlen([mine], SPLITS, group)
    assert len(group.sent) == 1


def test_an_environment_that_says_neither_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ULYSSES_COMM_VALIDATE", "maybe")
    with pytest.raises(ValueError, match=r"ULYSSES_COMM_VALIDATE='maybe'.*expected 1 or 0"):
        exchange(SpyGroup(0, WORLD), False)


def refuses_oddly(group: Any) -> str:
    """Rank 1 fails its own check by something other than a ValueError, then all agree again."""
    limit = timedelta(seconds=5)
    try:
        if group.rank() == 1:
            mine = torch.ones(SPLITS[1], WORLD, 4)
            scatter_heads_gather_seqlen([mine], Broken(), group, validate=limit)
        else:
            exchange(group, limit)
    except (TypeError, RuntimeError) as error:
        message = str(error)
    exchange(group, limit)
    return message


class Broken(list):
    """Split sizes that raise when they are counted."""

    def __len__(self) -> int:
        raise TypeError("counting is broken")


@pytest.mark.gloo
def test_any_error_of_one_rank_is_told_and_leaves_the_checks_in_step() -> None:
    outcomes = rank_outcomes(refuses_oddly, WORLD, timeout=60)
    assert [outcome.error for outcome in outcomes] == [None] * WORLD
    assert outcomes[1].result == "counting is broken"
    for rank in (0, 2):
        assert (
            "rank 1 refused its own input: TypeError: counting is broken" in outcomes[rank].result
        )


@pytest.mark.parametrize("fact", ["tracked by autograd", "device"])
def test_what_would_part_the_ranks_later_is_compared_too(fact: str) -> None:
    """One rank alone would go backward, or send from where the others do not receive."""

    def step(group: Any) -> None:
        odd = group.rank() == 1
        device = "meta" if odd and fact == "device" else "cpu"
        mine = torch.ones(SPLITS[group.rank()], WORLD, 4, device=device)
        mine.requires_grad_(odd and fact == "tracked by autograd")
        scatter_heads_gather_seqlen([mine], SPLITS, group, validate=True)

    with pytest.raises(RankDisagreementError, match=f"{fact}: .* on ranks 0, 2, .* on rank 1"):
        simulate(WORLD, step)
