"""Ranks that compare inside torch.compile: the same errors, and nothing in a steady loop."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from tests.traffic import calls_of
from tests.ulysses_comm.compiling import Compiled, fresh_compiler, of_any_length
from tests.ulysses_comm.test_agreement import CountingStore
from ulysses_comm import (
    Agreement,
    RankDisagreementError,
    scatter_heads_gather_seqlen,
    scatter_seqlen_gather_heads,
    simulate,
)

SPLITS = [2, 0, 1]
WORLD = len(SPLITS)


@pytest.fixture(autouse=True)
def nan_filled_empty() -> None:
    """Leave `torch.empty` alone: deterministic algorithms are part of a graph's guards."""


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    with fresh_compiler():
        yield


def there_and_back(x: torch.Tensor, splits: Any, group: Any, validate: Any) -> torch.Tensor:
    (whole,) = scatter_heads_gather_seqlen([x * 2], splits, group, validate=validate)
    return scatter_seqlen_gather_heads(whole * 2, splits, group, validate=validate)


def shard(rank: int, splits: Any = SPLITS, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(splits[rank], WORLD, 4, dtype=dtype)


@pytest.mark.parametrize("eager_rank", [None, 0, 1])
@pytest.mark.parametrize("kind", ["every call", "Agreement"])
def test_a_disagreement_is_the_same_error_on_all_ranks(eager_rank: int | None, kind: str) -> None:
    """A rank may compile and another not: they still mean the same exchange, or say so."""

    def step(group: Any) -> str:
        rank = group.rank()
        validate = Agreement() if kind == "Agreement" else True
        call = there_and_back if rank == eager_rank else Compiled(there_and_back)
        assert (call(shard(rank), SPLITS, group, validate) == 4).all()
        # A layout that no rank knows yet, for an Agreement to ask about.
        other = torch.cat([shard(rank)] * 2, dim=1)
        with pytest.raises(RankDisagreementError) as caught:
            call(other.bfloat16() if rank == 1 else other, SPLITS, group, validate)
        assert (call(other, SPLITS, group, validate) == 4).all()
        return str(caught.value)

    simulation = simulate(WORLD, step)
    (text,) = set(simulation.results)
    assert "torch.bfloat16" in text
    assert "rank 1" in text
    assert len(calls_of(simulation)) == 4, "nothing was sent in vain"


def test_a_steady_compiled_loop_asks_the_store_nothing() -> None:
    def step(group: Any) -> tuple[int, int, int]:
        group._store = store = CountingStore(group.get_group_store())
        agreement, compiled = Agreement(), Compiled(there_and_back)
        compiled(shard(group.rank()), SPLITS, group, agreement)
        first = store.counts.total()
        for _ in range(3):
            compiled(shard(group.rank()), SPLITS, group, agreement)
        return compiled.count, first, store.counts.total() - first

    for count, first, later in simulate(WORLD, step).results:
        assert count == 1
        assert first > 0
        assert later == 0


@pytest.mark.parametrize("forgetful", range(WORLD))
@pytest.mark.parametrize("how", ["new object", "cleared", "eager", "new graph"])
def test_ranks_with_other_memories_take_the_same_path(forgetful: int, how: str) -> None:
    """FastVideo #1807: what was agreed on stands in the store, so nobody waits for the others."""

    def step(group: Any) -> None:
        agreement, call = Agreement(), Compiled(there_and_back)
        call(shard(group.rank()), SPLITS, group, agreement)
        if group.rank() == forgetful:
            if how == "new object":
                agreement = Agreement()
            elif how == "cleared":
                agreement.clear()
            else:
                call = there_and_back if how == "eager" else Compiled(there_and_back)
        for splits in (SPLITS, SPLITS, SPLITS[::-1]):
            call(shard(group.rank(), splits), splits, group, agreement)

    assert len(calls_of(simulate(WORLD, step))) == 8


def test_one_graph_compares_each_split_that_it_meets() -> None:
    def step(group: Any) -> list[str]:
        compiled, agreement, texts = Compiled(there_and_back), Agreement(), []
        for splits, odd in [([2, 0, 1], 0), ([1, 1, 1], 0), ([0, 3, 2], 1), ([2, 0, 1], 0)]:
            x = shard(group.rank(), splits)
            of_any_length(x)
            sizes = torch.tensor(splits)
            sizes[2] += odd * (group.rank() == 1)  # another rank's share, as rank 1 sees it
            try:
                compiled(x, sizes, group, agreement)
                texts.append("")
            except RankDisagreementError as error:
                texts.append(str(error))
        assert compiled.count == 1
        return texts

    for texts in simulate(WORLD, step).results:
        assert [bool(text) for text in texts] == [False, False, True, False]
        assert "split_sizes: [0, 3, 2] on ranks 0, 2, [0, 3, 3] on rank 1" in texts[2]


def test_the_environment_turns_it_on_in_compiled_regions_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ULYSSES_COMM_VALIDATE", "1")

    def step(group: Any) -> None:
        dtype = torch.bfloat16 if group.rank() == 1 else torch.float32
        with pytest.raises(RankDisagreementError, match="bfloat16"):
            Compiled(there_and_back)(shard(group.rank(), dtype=dtype), SPLITS, group, False)

    assert calls_of(simulate(WORLD, step)) == []


def test_a_time_to_wait_is_given_by_an_agreement() -> None:
    def step(group: Any) -> None:
        with pytest.raises(RuntimeError, match=r"expected True, or Agreement\(timeout\)"):
            Compiled(there_and_back)(shard(group.rank()), SPLITS, group, timedelta(seconds=1))

    simulate(WORLD, step)
