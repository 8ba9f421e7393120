"""`keep_dtypes=True`: one collective, every result in its input's dtype, head dims may differ."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch.distributed as dist

from tests import cases, reference
from tests.bits import assert_same_bits, random_bits
from tests.cases import BF16, FP16, FP32, HEAD_DIM
from tests.spy import exchange_with_spies
from tests.traffic import calls_of
from ulysses_comm import (
    LONE_RANK,
    scatter_heads_gather_seqlen,
    scatter_seqlen_gather_heads,
    simulate,
)

FP8 = torch.float8_e4m3fn
DTYPES = [torch.float64, FP32, BF16, FP16, torch.int64, torch.int8, torch.uint8, torch.bool, FP8,
          torch.float8_e5m2, torch.int16, torch.complex64]  # fmt: skip
SPLITS = (3, 0, 2)


def exchange(inputs: list[list[torch.Tensor]], splits: tuple[int, ...]) -> list[list[torch.Tensor]]:
    results, _ = exchange_with_spies(
        len(splits),
        functools.partial(kept, inputs, splits),
    )
    return results


def kept(
    inputs: list[list[torch.Tensor]], splits: tuple[int, ...], group: dist.ProcessGroup
) -> list[torch.Tensor]:
    return scatter_heads_gather_seqlen(inputs[group.rank()], splits, group, keep_dtypes=True)


def assert_right(
    results: list[list[torch.Tensor]], inputs: list[list[torch.Tensor]], what: str = ""
) -> None:
    for rank, received in enumerate(results):
        expected = reference.scatter_heads_one_by_one(inputs, rank)
        assert len(received) == len(expected)
        for index, (result, want) in enumerate(zip(received, expected, strict=True)):
            assert_same_bits(result, want, f"{what} input {index}, rank {rank}")
            assert result.data_ptr() % result.element_size() == 0
            assert result.stride(-1) == 1 or result.shape[-1] == 1


@pytest.mark.parametrize("first", DTYPES, ids=str)
def test_every_pair_of_dtypes_is_kept(first: torch.dtype) -> None:
    for second in DTYPES:
        heads = cases.Heads((1, 2), (first, second))
        for head_dim in (1, 3, 8):
            inputs = cases.inputs_of_all(SPLITS, heads, head_dim)
            assert_right(exchange(inputs, SPLITS), inputs, f"{first}, {second}, D {head_dim}:")


@pytest.mark.parametrize(
    "dtypes",
    [
        *itertools.permutations((FP32, BF16, torch.int8)),
        (BF16, BF16, FP8),
        (FP8, FP32, FP8),
        (torch.int8, torch.float64, torch.bool),
        (BF16, BF16, FP32),
    ],
    ids=lambda dtypes: "-".join(str(dtype).removeprefix("torch.") for dtype in dtypes),
)
def test_three_dtypes_with_three_head_dims(dtypes: tuple[torch.dtype, ...]) -> None:
    """Odd head dims and one-byte dtypes first, so that a wide one would start misaligned."""
    for head_dims in ((1, 1, 1), (3, 5, 7), (16, 8, 1), (2, 3, 4)):
        inputs = [
            [
                random_bits((tokens, 3 * heads, head_dim), dtype, seed=17 * rank + index)
                for index, (heads, head_dim, dtype) in enumerate(
                    zip((1, 3, 2), head_dims, dtypes, strict=True)
                )
            ]
            for rank, tokens in enumerate(SPLITS)
        ]
        assert_right(exchange(inputs, SPLITS), inputs, f"head dims {head_dims}:")


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_mixed_dtypes_travel_in_one_collective_with_one_copy(world_size: int) -> None:
    for splits in cases.SPLITS[world_size]:
        heads = cases.Heads((2, 1, 1), (FP32, BF16, BF16))
        inputs = cases.inputs_of_all(splits, heads)

        simulation = simulate(world_size, functools.partial(kept, inputs, splits))
        assert_right(simulation.results, inputs)
        (call,) = calls_of(simulation)
        for rank, tensors in enumerate(inputs):
            payload = sum(tensor.nbytes for tensor in tensors)
            assert call.copied_bytes[rank] == payload
            # No promotion on the wire, and no padding where everything is aligned anyway.
            assert sum(call.bytes_by_pair[rank]) == payload
            storages = {r.untyped_storage().data_ptr() for r in simulation.results[rank]}
            assert len(storages) == 1


def test_one_dtype_and_head_dim_is_the_plain_exchange() -> None:
    for heads in cases.PACKED_HEADS:
        inputs = cases.inputs_of_all(SPLITS, heads)
        results = exchange(inputs, SPLITS)
        for rank, received in enumerate(results):
            expected = reference.scatter_heads_results(inputs, rank)
            for result, want in zip(received, expected, strict=True):
                assert_same_bits(result, want, f"{heads}, rank {rank}", strides=True)


def test_promotion_is_the_default_and_other_head_dims_are_refused_there() -> None:
    inputs = cases.inputs_of_all(SPLITS, cases.Heads((1, 1, 1), (FP32, BF16, BF16)))
    results, _ = exchange_with_spies(
        3, lambda group: scatter_heads_gather_seqlen(inputs[group.rank()], SPLITS, group)
    )
    assert {result.dtype for received in results for result in received} == {FP32}
    kept = exchange(inputs, SPLITS)
    assert [result.dtype for result in kept[0]] == [FP32, BF16, BF16]


def test_kept_dtypes_come_back_through_the_output_exchange() -> None:
    heads = cases.Heads((1, 2, 1), (FP32, BF16, FP8))
    inputs = cases.inputs_of_all(SPLITS, heads)

    def step(group: dist.ProcessGroup) -> list[torch.Tensor]:
        received = scatter_heads_gather_seqlen(
            inputs[group.rank()], SPLITS, group, keep_dtypes=True
        )
        return [scatter_seqlen_gather_heads(r.contiguous(), SPLITS, group) for r in received]

    for rank, back in enumerate(simulate(3, step).results):
        for result, want in zip(back, inputs[rank], strict=True):
            assert_same_bits(result, want, f"rank {rank}")


def test_non_contiguous_inputs_and_unpacked_head_shards_keep_their_dtypes() -> None:
    splits = (2, 3)
    inputs = []
    for rank, tokens in enumerate(splits):
        wide = random_bits((HEAD_DIM, 4, tokens), FP32, rank).permute(2, 1, 0)
        shards = random_bits((2, tokens, 3, HEAD_DIM), BF16, rank).permute(1, 0, 2, 3)
        every_second = random_bits((tokens, 2, 10), torch.int8, rank)[..., ::2]
        inputs.append([wide, shards, every_second])
    assert_right(exchange(inputs, splits), inputs)


def test_zero_tokens_everywhere() -> None:
    splits = (0, 0)
    inputs = cases.inputs_of_all(splits, cases.Heads((1, 2), (FP32, BF16)))
    assert_right(exchange(inputs, splits), inputs)


def test_a_lone_rank_gets_its_inputs_back() -> None:
    tensors = [random_bits((3, 2, 5), FP32, 0), random_bits((3, 4, 7), BF16, 1)]
    results = scatter_heads_gather_seqlen(tensors, [3], LONE_RANK, keep_dtypes=True)
    assert [id(result) for result in results] == [id(tensor) for tensor in tensors]
