"""Splits of heads: what they accept, and that query groups stay whole where they can."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch

from ulysses_comm import (
    HeadSplit,
    local_kv_heads,
    scatter_heads_gather_seqlen,
    simulate,
    split_query_groups,
)

UNEVEN = HeadSplit(4, ((0, 1), (1, 4)))


@pytest.mark.parametrize(
    "counts", [(1, 3), np.array([1, 3]), [np.int64(1), 3], iter([1, 3]), torch.tensor([1, 3])]
)
def test_whole_numbers_of_any_kind_make_the_same_split(counts: Any) -> None:
    split = HeadSplit.of_counts(counts)
    assert split == UNEVEN
    assert {type(bound) for pair in split.ranges for bound in pair} == {int}
    assert type(split.num_heads) is int


@pytest.mark.parametrize("ranges", [[(0, 1), (1, 4)], [[0, 1], [1, 4]], np.array([[0, 1], [1, 4]])])
def test_ranges_in_lists_can_be_exchanged_with(ranges: Any) -> None:
    """A list cannot be hashed, which layouts are remembered by."""
    assert HeadSplit(np.int64(4), ranges) == UNEVEN
    assert hash(HeadSplit(4, ranges)) == hash(UNEVEN)


@pytest.mark.parametrize("counts", [[1.0, 3.0], [True, 3], [np.True_, 3], ["1", 3], "13"])
def test_counts_that_are_not_whole_numbers_are_refused(counts: Any) -> None:
    with pytest.raises(ValueError, match=r"counts=.*expected a whole number"):
        HeadSplit.of_counts(counts)


@pytest.mark.parametrize("ranges", [None, 4, [1, 3], [(0, 1, 2), (2, 4)], [(0,), (1, 4)]])
def test_ranges_that_are_not_pairs_are_refused(ranges: Any) -> None:
    with pytest.raises(ValueError, match=r"ranges=.*expected \(start, stop\) for each rank"):
        HeadSplit(4, ranges)


def test_a_split_over_no_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="ranges"):
        HeadSplit.of_counts([])


def test_floats_do_not_poison_what_others_find() -> None:
    """Layouts are remembered by splits, and 1.0 == 1: the next caller found a layout of floats."""
    with pytest.raises(ValueError, match="whole number"):
        HeadSplit(4, ((0, 1.0), (1.0, 4)))  # type: ignore[arg-type]
    mine = torch.arange(5 * 4 * 7.0).view(5, 4, 7)  # no other test has such heads

    def step(group: Any) -> torch.Tensor:
        shard = mine.split([3, 2])[group.rank()]
        return scatter_heads_gather_seqlen([shard], [3, 2], group, head_splits=[UNEVEN])[0]

    assert torch.equal(torch.cat(simulate(2, step).results, dim=1), mine)


def can_keep_groups_whole(num_heads: int, num_kv_heads: int, world_size: int) -> bool:
    """Whether some split within the limit gives each rank whole groups, or heads of one group."""
    limit, group = -(-num_heads // world_size), num_heads // num_kv_heads

    @functools.cache
    def rest_fits(start: int, ranks: int) -> bool:
        if start == num_heads or ranks == 0:
            return start == num_heads
        stops = range(start + 1, min(start + limit, num_heads) + 1)
        return any(is_whole(start, stop, group) and rest_fits(stop, ranks - 1) for stop in stops)

    return rest_fits(0, world_size)


def is_whole(start: int, stop: int, group: int) -> bool:
    return start % group == stop % group == 0 or start // group == (stop - 1) // group


@pytest.mark.parametrize("num_heads", [1, 2, 6, 8, 9, 10, 12, 14, 15, 24])
def test_query_groups_are_split_as_promised(num_heads: int) -> None:
    for num_kv_heads in (n for n in range(1, num_heads + 1) if num_heads % n == 0):
        group = num_heads // num_kv_heads
        for world_size in range(1, 13):
            query, key_value = split_query_groups(num_heads, num_kv_heads, world_size)
            case = (num_heads, num_kv_heads, world_size, query.counts)
            assert query.num_heads == sum(query.counts) == num_heads, case
            assert max(query.counts) <= -(-num_heads // world_size), case
            for rank, (start, stop) in enumerate(query.ranges):
                first, last = key_value.ranges[rank]
                read = [first + i for i in local_kv_heads(query, key_value, rank)]
                assert read == [head // group for head in range(start, stop)], case
                assert set(read) == set(range(first, last)), case
            owning = [pair for pair in query.ranges if pair[0] < pair[1]]
            if not all(is_whole(*pair, group) for pair in owning):
                assert not can_keep_groups_whole(num_heads, num_kv_heads, world_size), case
