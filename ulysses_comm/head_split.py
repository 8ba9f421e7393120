"""Which heads of a tensor each rank attends with: even, uneven, or shared by several ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from ulysses_comm.layout import balanced_split_sizes, whole_number


@dataclass(frozen=True)
class HeadSplit:
    """The heads [start, stop) that each rank gets, in rank order.

    Ranges run upward and cover every head. They may be of different lengths, empty, or overlap:
    a key/value head goes to every rank whose query heads read it.

    Attributes:
        num_heads: Heads of the whole tensor.
        ranges: (start, stop) for each rank.
    """

    num_heads: int
    ranges: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        """Check that the ranges run upward within the heads and leave none out.

        Raises:
            ValueError: If not, or if they are not pairs of whole numbers.
        """
        self._make_plain()
        covered, last_start = 0, 0
        for rank, (start, stop) in enumerate(self.ranges):
            if not last_start <= start <= stop <= self.num_heads or start > covered:
                raise ValueError(
                    f"ranges={list(self.ranges)}: rank {rank} gets heads [{start}, {stop}) of "
                    f"{self.num_heads}, expected ranges that run upward and leave no head out."
                )
            covered, last_start = max(covered, stop), start
        if covered != self.num_heads or not self.ranges:
            raise ValueError(
                f"ranges={list(self.ranges)} end at head {covered}: expected all "
                f"{self.num_heads} heads to be covered."
            )

    @classmethod
    def balanced(cls, num_heads: int, world_size: int) -> HeadSplit:
        """Give every rank its share of the heads, early ranks one more where they do not divide."""
        return cls.of_counts(balanced_split_sizes(num_heads, world_size))

    @classmethod
    def of_counts(cls, counts: Iterable[int]) -> HeadSplit:
        """Give each rank so many heads, one rank's after the other's."""
        stops = list(itertools.accumulate([whole_number("counts", count) for count in counts]))
        starts = [0, *stops]
        return cls(starts[-1], tuple(zip(starts[:-1], stops, strict=True)))

    def _make_plain(self) -> None:
        """Turn what merely equals tuples of ints into them.

        Layouts are remembered by splits, and 2.0 == 2 == numpy.int64(2): one caller's floats would
        be found by everybody else.
        """
        if not _are_plain(self.ranges):
            object.__setattr__(self, "ranges", _plain_ranges(self.ranges))
        if type(self.num_heads) is not int:
            object.__setattr__(self, "num_heads", whole_number("num_heads", self.num_heads))

    @property
    def world_size(self) -> int:
        """Ranks that the heads are spread over."""
        return len(self.ranges)

    @property
    def counts(self) -> tuple[int, ...]:
        """Heads of each rank."""
        return tuple(stop - start for start, stop in self.ranges)

    @property
    def is_even(self) -> bool:
        """Whether every rank gets equally many heads and no head goes to two ranks."""
        return len(set(self.counts)) == 1 and not self.overlaps

    @property
    def overlaps(self) -> bool:
        """Whether some head goes to more than one rank."""
        return sum(self.counts) != self.num_heads


def _are_plain(ranges: object) -> bool:
    return type(ranges) is tuple and all(
        type(pair) is tuple and [type(bound) for bound in pair] == [int, int] for pair in ranges
    )


def _plain_ranges(ranges: object) -> tuple[tuple[int, int], ...]:
    pairs: list[object] = list(ranges) if isinstance(ranges, Iterable) else [ranges]
    plain = []
    for pair in pairs:
        bounds = list(pair) if isinstance(pair, Iterable) else []
        if len(bounds) != 2:
            raise ValueError(
                f"ranges={ranges!r}: expected (start, stop) for each rank. HeadSplit.of_counts "
                "makes them from head counts."
            )
        start, stop = (whole_number("ranges", bound) for bound in bounds)
        plain.append((start, stop))
    return tuple(plain)


def split_query_groups(
    num_heads: int, num_kv_heads: int, world_size: int
) -> tuple[HeadSplit, HeadSplit]:
    """Spread query heads over the ranks, and give each rank the key/value heads that they read.

    Args:
        num_heads: Query heads; query head h reads key/value head h * num_kv_heads // num_heads.
        num_kv_heads: Key/value heads, a divisor of num_heads: the same number (plain attention),
            fewer (grouped queries) or one (multi-query).
        world_size: Ranks of the group, any number.

    Returns:
        The split of the query heads and that of the key/value heads. No rank gets more than
        ceil(num_heads / world_size) query heads. Where that leaves a choice, no rank's query heads
        straddle two groups; where it does not, `local_kv_heads` says which head each one reads.

    Raises:
        ValueError: If a count is not positive or num_kv_heads does not divide num_heads.
    """
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"num_heads={num_heads}, num_kv_heads={num_kv_heads}: expected a positive number of "
            "key/value heads that divides the number of query heads."
        )
    query = HeadSplit.of_counts(_query_counts(num_heads, num_kv_heads, world_size))
    per_group = num_heads // num_kv_heads
    ranges, reached = [], 0
    for start, stop in query.ranges:
        if start == stop:
            ranges.append((reached, reached))
            continue
        reached = -(-stop // per_group)
        ranges.append((start // per_group, reached))
    return query, HeadSplit(num_kv_heads, tuple(ranges))


def local_kv_heads(query: HeadSplit, key_value: HeadSplit, rank: int) -> list[int]:
    """Return, for each query head of a rank, which of the rank's key/value heads it reads."""
    per_group = query.num_heads // key_value.num_heads
    first = key_value.ranges[rank][0]
    return [head // per_group - first for head in range(*query.ranges[rank])]


def _query_counts(num_heads: int, num_kv_heads: int, world_size: int) -> list[int]:
    """Split whole groups, or each group alone, where no rank gets more heads for it."""
    per_group = num_heads // num_kv_heads
    if world_size >= num_kv_heads:
        shares = balanced_split_sizes(world_size, num_kv_heads)
        counts = [count for share in shares for count in balanced_split_sizes(per_group, share)]
    else:
        counts = [n * per_group for n in balanced_split_sizes(num_kv_heads, world_size)]
    balanced = balanced_split_sizes(num_heads, world_size)
    return counts if max(counts) <= max(balanced) else balanced
