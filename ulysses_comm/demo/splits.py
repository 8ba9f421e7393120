"""Ways to deal a sequence out to ranks, from fair to awkward."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ulysses_comm import balanced_split_sizes


def skewed_split_sizes(length: int, world_size: int) -> list[int]:
    """Deal tokens out in proportion 1 : 3 : 5 : ..., what rounding leaves over to the last rank.

    Args:
        length: Tokens of the whole sequence.
        world_size: Ranks that share it.

    Returns:
        Tokens per rank, in rank order; the last rank owns about `2 * world_size` times as many as
        the first.
    """
    # The first world_size odd numbers add up to world_size ** 2.
    sizes = [length * (2 * rank + 1) // world_size**2 for rank in range(world_size)]
    sizes[-1] += length - sum(sizes)
    return sizes


def empty_rank_split_sizes(length: int, world_size: int) -> list[int]:
    """Leave rank 1 without a token; the others share the sequence as `skewed_split_sizes` does."""
    sizes = skewed_split_sizes(length, world_size - 1)
    return [*sizes[:1], 0, *sizes[1:]]


SPLITS: Mapping[str, Callable[[int, int], list[int]]] = {
    "skewed": skewed_split_sizes,
    "empty-rank": empty_rank_split_sizes,
    "balanced": balanced_split_sizes,
}
