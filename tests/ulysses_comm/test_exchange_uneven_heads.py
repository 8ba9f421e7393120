"""Heads that the ranks do not share evenly: any number over any group, key/value heads repeated."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tests.bits import TEST_DEVICE, assert_same_bits, random_bits
from ulysses_comm import (
    HeadSplit,
    gather_sequence,
    scatter_heads_gather_seqlen,
    scatter_seqlen_gather_heads,
    simulate,
    split_query_groups,
)

# (query heads, key/value heads): plain, fewer than ranks, grouped, multi-query, one.
HEADS = [(7, 7), (12, 12), (20, 20), (8, 2), (10, 2), (6, 2), (20, 4), (40, 8), (8, 1), (1, 1)]
SPLITS = {
    2: (3, 2),
    3: (0, 4, 1),
    4: (2, 0, 3, 1),
    5: (1, 1, 0, 2, 1),
    8: (0, 1, 2, 0, 1, 1, 3, 1),
}
MIXED = (torch.bfloat16, torch.float32, torch.float16)

every_group = pytest.mark.parametrize("world_size", SPLITS)
every_head_count = pytest.mark.parametrize(
    "heads", HEADS, ids=lambda heads: f"{heads[0]}-{heads[1]}"
)


def whole_tensors(
    splits: tuple[int, ...], heads: tuple[int, int], dtypes: Any, head_dims: Any
) -> list[torch.Tensor]:
    """Q, K and V of the whole model: random bits."""
    return [
        random_bits((sum(splits), count, head_dim), dtype, seed=index)
        for index, (count, dtype, head_dim) in enumerate(
            zip((heads[0], heads[1], heads[1]), dtypes, head_dims, strict=True)
        )
    ]


def own(tensor: torch.Tensor, splits: tuple[int, ...], rank: int) -> torch.Tensor:
    return tensor.split(list(splits))[rank]


@every_group
@every_head_count
@pytest.mark.parametrize("kind", ["one dtype", "kept dtypes and head dims"])
def test_each_rank_gets_its_heads_of_all_tokens_and_gives_them_back(
    world_size: int, heads: tuple[int, int], kind: str
) -> None:
    splits, keep = SPLITS[world_size], kind != "one dtype"
    query, key_value = split_query_groups(*heads, world_size)
    head_splits = [query, key_value, key_value]
    dtypes, dims = (MIXED, (3, 3, 5)) if keep else ((torch.bfloat16,) * 3, (4, 4, 4))
    whole = whole_tensors(splits, heads, dtypes, dims)

    def step(group: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
        mine = [own(tensor, splits, group.rank()) for tensor in whole]
        got = scatter_heads_gather_seqlen(
            mine, splits, group, head_splits=head_splits, keep_dtypes=keep, validate=True
        )
        back = scatter_seqlen_gather_heads(
            got[0].contiguous(), splits, group, head_split=query, validate=True
        )
        return got, back

    simulation = simulate(world_size, step)
    assert len(simulation.traffic) == 2
    for rank, (got, back) in enumerate(simulation.results):
        for tensor, split, result in zip(whole, head_splits, got, strict=True):
            start, stop = split.ranges[rank]
            assert_same_bits(result, tensor[:, start:stop], f"rank {rank}")
        assert_same_bits(back, own(whole[0], splits, rank), f"back on rank {rank}")


@every_group
@every_head_count
@pytest.mark.parametrize("keep", [False, True], ids=["promoted", "kept"])
def test_gradients_of_shared_heads_are_summed_over_their_ranks(
    world_size: int, heads: tuple[int, int], keep: bool
) -> None:
    splits = SPLITS[world_size]
    query, key_value = split_query_groups(*heads, world_size)
    head_splits = [query, key_value, key_value]
    shapes = [(sum(splits), count, 4) for count in (heads[0], *heads[1:] * 2)]
    whole = [torch.randn(shape, device=TEST_DEVICE).double() for shape in shapes]
    # Small whole numbers: sums are exact in every dtype and order.
    weights = [torch.randint_like(tensor, -3, 4) for tensor in whole]
    dtypes = (torch.float64, torch.float32, torch.float64) if keep else (torch.float64,) * 3

    def step(group: Any) -> list[torch.Tensor | None]:
        rank = group.rank()
        leaves = [
            own(tensor, splits, rank).to(dtype).requires_grad_()
            for tensor, dtype in zip(whole, dtypes, strict=True)
        ]
        got = scatter_heads_gather_seqlen(
            leaves, splits, group, head_splits=head_splits, keep_dtypes=keep
        )
        loss = sum(
            (result * weight[:, slice(*split.ranges[rank])]).sum()
            for result, weight, split in zip(got, weights, head_splits, strict=True)
        )
        assert isinstance(loss, torch.Tensor)
        loss.backward()
        return [leaf.grad for leaf in leaves]

    results = simulate(world_size, step).results
    for index, (weight, split) in enumerate(zip(weights, head_splits, strict=True)):
        readers = weight.new_zeros(split.num_heads)
        for start, stop in split.ranges:
            readers[start:stop] += 1
        grad = torch.cat([grads[index] for grads in results])
        assert grad.dtype == dtypes[index]
        assert torch.equal(grad.double(), weight * readers[:, None])


@pytest.mark.parametrize(
    "dtype",
    [torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.complex128,
     torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.bool, torch.int64, torch.float64],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("counts", [(1, 2), (3, 0)], ids=str)
def test_every_dtype_travels_with_uneven_heads(dtype: torch.dtype, counts: tuple[int, int]) -> None:
    """Dtypes that backends lack go as bytes, and the counts must follow."""
    splits, split = (2, 1), HeadSplit.of_counts(list(counts))
    shape = (3, 3, 4, 2) if dtype.is_complex else (3, 3, 4)
    real = {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)
    whole = random_bits(shape, real, seed=1)
    whole = torch.view_as_complex(whole) if dtype.is_complex else whole

    def step(group: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mine = own(whole, splits, group.rank())
        (got,) = scatter_heads_gather_seqlen([mine], splits, group, head_splits=[split])
        back = scatter_seqlen_gather_heads(got.contiguous(), splits, group, head_split=split)
        flat = gather_sequence(mine[:, 0, 0].contiguous(), group, splits, dim=0)
        return got, back, flat

    for rank, (got, back, flat) in enumerate(simulate(2, step).results):
        start, stop = split.ranges[rank]
        assert_same_bits(got, whole[:, start:stop])
        assert_same_bits(back, own(whole, splits, rank))
        assert_same_bits(flat, whole[:, 0, 0])


@pytest.mark.parametrize(
    "dtype",
    [torch.float8_e4m3fn, torch.bfloat16, torch.uint16, torch.int32, torch.float64],
    ids=str,
)
def test_shared_heads_of_an_output_are_summed_in_every_dtype(dtype: torch.dtype) -> None:
    split = HeadSplit(2, ((0, 2), (1, 2)))  # both ranks have head 1
    values = [torch.full((3, 2, 4), 1.0), torch.full((3, 1, 4), 2.0)]

    def step(group: Any) -> torch.Tensor:
        mine = values[group.rank()].to(TEST_DEVICE).to(dtype)
        return scatter_seqlen_gather_heads(mine, (1, 2), group, head_split=split)

    for rank, result in enumerate(simulate(2, step).results):
        expected = torch.tensor([1.0, 3.0])[None, :, None].expand(rank + 1, 2, 4)
        assert torch.equal(result.double().cpu(), expected.double())
        assert result.dtype == dtype


def test_no_rank_gets_more_query_heads_than_its_share() -> None:
    for (query_heads, kv_heads), world_size in itertools.product(HEADS, range(1, 11)):
        query, key_value = split_query_groups(query_heads, kv_heads, world_size)
        assert max(query.counts) == -(-query_heads // world_size)
        assert sum(query.counts) == query_heads
        per_group = query_heads // kv_heads
        for (start, stop), (first, last) in zip(query.ranges, key_value.ranges, strict=True):
            needed = {head // per_group for head in range(start, stop)}
            assert set(range(first, last)) == needed
