"""Head shards that look as if they tiled one send buffer and do not: copied, and right.

Each builder gets a rank's number of tokens and returns the inputs of that rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.bits import random_bits
from tests.cases import BF16, FP16, FP32, HEAD_DIM

WORLD = 4
COUNTS = (2, 1, 1)

NearMiss = Callable[[int], list[torch.Tensor]]
near_misses: dict[str, NearMiss] = {}


def near_miss(make: NearMiss) -> NearMiss:
    """Register a builder of head shards, given a rank's number of tokens, that tile no buffer."""
    near_misses[make.__name__.replace("_", " ")] = make
    return make


def bits(shape: tuple[int, ...], dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    return random_bits(shape, dtype, seed + shape[0])


def views_of(buffer: torch.Tensor, counts: tuple[int, ...] = COUNTS) -> list[torch.Tensor]:
    """Split a `[W, S_r, H, D]` buffer into head shards `[S_r, W, H_i, D]`."""
    return list(buffer.permute(1, 0, 2, 3).split(counts, dim=2))


def whole_buffer(tokens: int, heads: int = sum(COUNTS), dtype: torch.dtype = BF16) -> torch.Tensor:
    return bits((WORLD, tokens, heads, HEAD_DIM), dtype)


@near_miss
def separate_buffers(tokens: int) -> list[torch.Tensor]:
    return [
        bits((WORLD, tokens, count, HEAD_DIM), seed=i).permute(1, 0, 2, 3)
        for i, count in enumerate(COUNTS)
    ]


@near_miss
def separate_token_major(tokens: int) -> list[torch.Tensor]:
    return [bits((tokens, WORLD, count, HEAD_DIM), seed=i) for i, count in enumerate(COUNTS)]


@near_miss
def one_of_them_from_another_buffer(tokens: int) -> list[torch.Tensor]:
    return [*views_of(whole_buffer(tokens))[:2], views_of(whole_buffer(tokens) + 0)[2].clone()]


@near_miss
def same_place_in_two_buffers(tokens: int) -> list[torch.Tensor]:
    first, second = whole_buffer(tokens), bits((WORLD, tokens, sum(COUNTS), HEAD_DIM), seed=9)
    return [*views_of(first)[:2], views_of(second)[2]]


@near_miss
def reordered(tokens: int) -> list[torch.Tensor]:
    k, v, q = views_of(whole_buffer(tokens), (1, 1, 2))
    return [q, k, v]


@near_miss
def last_two_swapped(tokens: int) -> list[torch.Tensor]:
    q, k, v = views_of(whole_buffer(tokens))
    return [q, v, k]


@near_miss
def the_same_view_three_times(tokens: int) -> list[torch.Tensor]:
    return [views_of(whole_buffer(tokens, 3), (1, 1, 1))[0]] * 3


@near_miss
def packed_for_half_as_many_ranks(tokens: int) -> list[torch.Tensor]:
    return views_of(bits((WORLD // 2, tokens, 2 * sum(COUNTS), HEAD_DIM)), (4, 2, 2))


@near_miss
def packed_for_twice_as_many_ranks(tokens: int) -> list[torch.Tensor]:
    return views_of(bits((WORLD * 2, tokens, sum(COUNTS), HEAD_DIM)))


@near_miss
def packed_for_one_rank(tokens: int) -> list[torch.Tensor]:
    return views_of(bits((1, tokens, 16, HEAD_DIM)), (8, 4, 4))


@near_miss
def overlapping(tokens: int) -> list[torch.Tensor]:
    whole = whole_buffer(tokens).permute(1, 0, 2, 3)
    return [whole[:, :, 0:2], whole[:, :, 1:2], whole[:, :, 3:4]]


@near_miss
def with_a_gap(tokens: int) -> list[torch.Tensor]:
    whole = whole_buffer(tokens, heads=5).permute(1, 0, 2, 3)
    return [whole[:, :, 0:2], whole[:, :, 3:4], whole[:, :, 4:5]]


@near_miss
def with_a_gap_in_front(tokens: int) -> list[torch.Tensor]:
    return views_of(whole_buffer(tokens, heads=5)[:, :, 1:])


@near_miss
def with_extra_trailing_heads(tokens: int) -> list[torch.Tensor]:
    return views_of(whole_buffer(tokens, heads=5)[:, :, :4])


@near_miss
def part_of_the_pack(tokens: int) -> list[torch.Tensor]:
    return views_of(whole_buffer(tokens))[:2]


@near_miss
def behind_a_storage_offset(tokens: int) -> list[torch.Tensor]:
    count = WORLD * tokens * sum(COUNTS) * HEAD_DIM
    storage = bits((count + HEAD_DIM,))
    return views_of(storage[HEAD_DIM:].view(WORLD, tokens, sum(COUNTS), HEAD_DIM))


@near_miss
def rows_of_a_buffer_for_more_ranks(tokens: int) -> list[torch.Tensor]:
    return views_of(bits((WORLD + 2, tokens, sum(COUNTS), HEAD_DIM))[1:-1])


@near_miss
def tokens_of_a_longer_buffer(tokens: int) -> list[torch.Tensor]:
    return views_of(whole_buffer(tokens + 3)[:, 1 : tokens + 1])


@near_miss
def first_tokens_of_a_longer_buffer(tokens: int) -> list[torch.Tensor]:
    return views_of(whole_buffer(tokens + 3)[:, :tokens])


@near_miss
def channels_of_a_wider_buffer(tokens: int) -> list[torch.Tensor]:
    return views_of(bits((WORLD, tokens, sum(COUNTS), 2 * HEAD_DIM))[..., :HEAD_DIM])


@near_miss
def transposed_heads_and_channels(tokens: int) -> list[torch.Tensor]:
    return views_of(bits((WORLD, tokens, HEAD_DIM, sum(COUNTS))).transpose(2, 3))


@near_miss
def one_token_major_buffer(tokens: int) -> list[torch.Tensor]:
    return list(bits((tokens, WORLD, sum(COUNTS), HEAD_DIM)).split(COUNTS, dim=2))


@near_miss
def of_another_dtype(tokens: int) -> list[torch.Tensor]:
    """The geometry fits, but the middle one reads its bytes as another dtype."""
    q, k, v = views_of((whole_buffer(tokens, dtype=FP32) * 0 + 1).to(BF16))
    return [q, k.view(FP16), v]


@near_miss
def expanded_over_the_tokens(tokens: int) -> list[torch.Tensor]:
    return views_of(whole_buffer(1).expand(-1, tokens, -1, -1))


@near_miss
def expanded_over_the_ranks(tokens: int) -> list[torch.Tensor]:
    return views_of(whole_buffer(tokens)[:1].expand(WORLD, -1, -1, -1))


@near_miss
def one_of_them_not_head_shards(tokens: int) -> list[torch.Tensor]:
    q, k, v = views_of(whole_buffer(tokens))
    return [q.flatten(1, 2), k, v]


@near_miss
def conjugated(tokens: int) -> list[torch.Tensor]:
    """A lazily conjugated view has the buffer's bits but not its values."""
    buffer = torch.randn(WORLD, tokens, sum(COUNTS), HEAD_DIM, dtype=torch.complex64)
    return [view.conj() for view in views_of(buffer)]
