"""Which heads each rank attends with, and in how many turns; pure arithmetic.

All ranks compute the same plan from the head counts, so nothing has to be agreed on.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ulysses_comm.head_split import HeadSplit, split_query_groups
from ulysses_comm.layout import balanced_split_sizes


@dataclass(frozen=True)
class Selection:
    """Some heads of a tensor, and which of them each rank gets.

    Attributes:
        heads: The heads that travel, in ascending order.
        split: How those are spread over the ranks, counted among themselves.
    """

    heads: tuple[int, ...]
    split: HeadSplit

    @classmethod
    def of_ranges(cls, ranges: Sequence[tuple[int, int]]) -> Selection:
        """Select the heads [start, stop) of each rank."""
        heads = sorted({head for start, stop in ranges for head in range(start, stop)})
        place = {head: index for index, head in enumerate(heads)}
        placed, last = [], 0
        for start, stop in ranges:
            if start < stop:
                last = place[start]
            placed.append((last, last + stop - start))
        return cls(tuple(heads), HeadSplit(len(heads), tuple(placed)))


@dataclass(frozen=True)
class LocalHeads:
    """What one rank attends with in one turn.

    Attributes:
        query: The query heads [start, stop).
        key_value: The key/value heads [start, stop) that they read.
        key_value_offset: Place of the first of those among the key/value heads that the rank got.
        index: For each query head the key/value head that it reads, counted from the first one;
            None if equally many neighbouring query heads read each, as attention functions expect.
    """

    query: tuple[int, int]
    key_value: tuple[int, int]
    key_value_offset: int
    index: tuple[int, ...] | None

    @property
    def num_query(self) -> int:
        """Query heads of the turn."""
        return self.query[1] - self.query[0]


@dataclass(frozen=True)
class Turn:
    """One exchange, one attention and one exchange back.

    Attributes:
        query: The query heads that travel.
        key_value: The key/value heads that travel with them; None if they came with the first turn.
        local: What each rank attends with, in rank order.
    """

    query: Selection
    key_value: Selection | None
    local: tuple[LocalHeads, ...]


@dataclass(frozen=True)
class HeadPlan:
    """How attention over `num_heads` query heads is spread over ranks and turns.

    Attributes:
        num_heads: Query heads of the model.
        num_kv_heads: Key/value heads of the model.
        query: The query heads of each rank.
        key_value: The key/value heads of each rank.
        turns: One after the other.
    """

    num_heads: int
    num_kv_heads: int
    query: HeadSplit
    key_value: HeadSplit
    turns: tuple[Turn, ...]

    @property
    def is_even(self) -> bool:
        """Whether every rank attends with equally many heads, in each turn too."""
        return cuts_evenly([turn.query for turn in self.turns], self.query)


def cuts_evenly(selections: Sequence[Selection], split: HeadSplit) -> bool:
    """Whether each rank's heads are cut into the same, equally many heads for each rank."""
    return split.is_even and all(selection.split.is_even for selection in selections)


def plan_heads(num_heads: int, num_kv_heads: int, world_size: int, chunks: int) -> HeadPlan:
    """Plan attention. Pure; the cache only saves the arithmetic.

    Args:
        num_heads: Query heads of the model.
        num_kv_heads: Key/value heads, a divisor of that.
        world_size: Ranks.
        chunks: Turns asked for; there are never more than a rank has query heads.

    Raises:
        ValueError: If num_kv_heads does not divide num_heads.
    """
    # A trace is made once, and would warn of a cache.
    plan = _plan_heads if torch.compiler.is_compiling() else _remembered_plan
    return plan(num_heads, num_kv_heads, world_size, chunks)


def _plan_heads(num_heads: int, num_kv_heads: int, world_size: int, chunks: int) -> HeadPlan:
    query, key_value = split_query_groups(num_heads, num_kv_heads, world_size)
    chunks = min(chunks, max(query.counts))
    group = num_heads // num_kv_heads
    # Keys and values are cut along with the queries where some rank has enough of them; else all of
    # them travel in the first turn, and later turns read them there.
    cut_along = max(key_value.counts) >= chunks
    by_rank = [
        _cut_along(q, kv, group, chunks) if cut_along else _cut(q, chunks)
        for q, kv in zip(query.ranges, key_value.ranges, strict=True)
    ]
    turns = []
    for chunk in range(chunks):
        ranges = [cuts[chunk] for cuts in by_rank]
        read = [_read_by(q, group) for q in ranges]
        sent = read if cut_along else list(key_value.ranges) if chunk == 0 else None
        held = read if cut_along else key_value.ranges
        local = tuple(
            _local_heads(q, kv, first, group)
            for q, kv, (first, _) in zip(ranges, read, held, strict=True)
        )
        turns.append(
            Turn(
                Selection.of_ranges(ranges),
                None if sent is None else Selection.of_ranges(sent),
                local,
            )
        )
    return HeadPlan(num_heads, num_kv_heads, query, key_value, tuple(turns))


_remembered_plan = functools.lru_cache(maxsize=256)(_plan_heads)


def select_heads(
    tensor: torch.Tensor, selections: Sequence[Selection], split: HeadSplit
) -> list[torch.Tensor]:
    """Return the selected heads of (tokens, heads, ·) or head shards, for each selection.

    Views where every rank has equally many heads in each: head shards. Copies otherwise.

    Args:
        tensor: All heads.
        selections: Parts of `split`, together all of it.
        split: The heads of each rank.
    """
    if len(selections) == 1:
        return [tensor]
    if cuts_evenly(selections, split):
        shards = tensor if tensor.dim() == 4 else tensor.unflatten(1, (split.world_size, -1))
        return list(shards.split([s.split.counts[0] for s in selections], dim=2))
    return [tensor.index_select(1, torch.tensor(s.heads, device=tensor.device)) for s in selections]


def _cut(heads: tuple[int, int], chunks: int) -> list[tuple[int, int]]:
    """Cut [start, stop) into so many ranges, as equal as can be, early ones longer."""
    sizes = balanced_split_sizes(heads[1] - heads[0], chunks)
    stops = [heads[0] + stop for stop in itertools.accumulate(sizes)]
    return list(zip([heads[0], *stops[:-1]], stops, strict=True))


def _cut_along(
    query: tuple[int, int], key_value: tuple[int, int], group: int, chunks: int
) -> list[tuple[int, int]]:
    """Cut a rank's query heads where its key/value heads are cut."""
    return [
        (min(max(start * group, query[0]), query[1]), max(min(stop * group, query[1]), query[0]))
        for start, stop in _cut(key_value, chunks)
    ]


def _read_by(query: tuple[int, int], group: int) -> tuple[int, int]:
    """Return the key/value heads [start, stop) that query heads [start, stop) read."""
    start, stop = query
    if start == stop:
        return start // group, start // group
    return start // group, (stop - 1) // group + 1


def _local_heads(
    query: tuple[int, int], key_value: tuple[int, int], first_held: int, group: int
) -> LocalHeads:
    index = tuple(head // group - key_value[0] for head in range(*query))
    count, reads = len(index), key_value[1] - key_value[0]
    is_regular = reads > 0 and count % reads == 0
    if not count or (is_regular and index == tuple(i // (count // reads) for i in range(count))):
        return LocalHeads(query, key_value, max(key_value[0] - first_held, 0), None)
    return LocalHeads(query, key_value, key_value[0] - first_held, index)
