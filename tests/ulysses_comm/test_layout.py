"""Arithmetic of split sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ulysses_comm import balanced_split_sizes


@given(length=st.integers(0, 100_000), world_size=st.integers(1, 64))
def test_balanced_splits_add_up_and_differ_by_one_at_most(length: int, world_size: int) -> None:
    sizes = balanced_split_sizes(length, world_size)
    assert sum(sizes) == length
    assert len(sizes) == world_size
    assert sizes == sorted(sizes, reverse=True), "early ranks own the extra tokens"
    assert max(sizes) - min(sizes) <= 1
    assert sizes.count(length // world_size + 1) == length % world_size


@pytest.mark.parametrize(
    ("length", "world_size", "expected"),
    [
        (0, 3, [0, 0, 0]),
        (2, 4, [1, 1, 0, 0]),
        (7, 2, [4, 3]),
        (10, 4, [3, 3, 2, 2]),
        (29616, 8, [3702] * 8),
        (14601, 4, [3651, 3650, 3650, 3650]),
        (5, 1, [5]),
    ],
)
def test_balanced_splits_of_known_lengths(
    length: int, world_size: int, expected: list[int]
) -> None:
    assert balanced_split_sizes(length, world_size) == expected


@pytest.mark.parametrize(
    ("length", "world_size"),
    [(56700, 8), (8423, 8), (57826, 8), *((4 * k + 3, 4) for k in range(6))],
)
def test_shards_of_balanced_splits_are_the_whole_sequence(length: int, world_size: int) -> None:
    """VeOmni #61, #1139: floor division drops the last tokens."""
    sequence = torch.arange(length)
    shards = sequence.split(balanced_split_sizes(length, world_size))
    assert len(shards) == world_size
    assert torch.equal(torch.cat(shards), sequence)


@pytest.mark.parametrize(
    ("length", "world_size", "words"),
    [
        (-1, 4, "length=-1"),
        (4, 0, "world_size=0"),
        (4, -2, "world_size=-2"),
        (4.0, 2, "length=4.0: expected a whole number"),
        ("4", 2, "length='4': expected a whole number"),
        (4, True, "world_size=True: expected a whole number"),
        (4, 0.5, "world_size=0.5: expected a whole number"),
    ],
)
def test_balanced_splits_refuse_nonsense(length: Any, world_size: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        balanced_split_sizes(length, world_size)
