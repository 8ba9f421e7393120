"""Faults that users of other libraries reported, as far as they concern plain exchanges."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import cases, reference
from tests.bits import assert_same_bits, random_bits
from tests.cases import BF16, FP32
from tests.ranks import run_ranks
from tests.traffic import calls_of
from ulysses_comm import (
    RankDisagreementError,
    balanced_split_sizes,
    pack_head_shards,
    scatter_heads_gather_seqlen,
    scatter_seqlen_gather_head_shards,
    scatter_seqlen_gather_heads,
    simulate,
    simulate_world,
)

HEAD_DIM = 4


def per_head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Stand in for attention: mixes all tokens, one head at a time, in an order that never varies.

    A running sum of integers in float64, so that sharding cannot change a bit.
    """
    return (q.cumsum(0) * 3 + k.flip(0).cumsum(0) * 5 + v * v.sum(0)).contiguous()


def whole_inputs(length: int, heads: tuple[int, int], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(-99, 99, (length, n, HEAD_DIM), generator=generator).double()
        for n in (heads[0], heads[1], heads[1])
    ]


def expand_kv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
    repeat = q.shape[1] // k.shape[1]
    return [q, *(t.repeat_interleave(repeat, dim=1) for t in (k, v))]


def layer(group: dist.ProcessGroup, whole: list[torch.Tensor], splits: list[int]) -> torch.Tensor:
    local = [tensor.split(splits)[group.rank()] for tensor in whole]
    received = scatter_heads_gather_seqlen(local, splits, group)
    return scatter_seqlen_gather_heads(per_head(*expand_kv(*received)), splits, group)


@pytest.mark.parametrize(
    ("length", "world_size"),
    [(7, 2), (10, 4), (3, 4), (0, 4), (1, 8), (1000, 8), (63, 3), (8423, 8), (57826, 8)],
)
def test_lengths_that_the_group_does_not_divide_equal_one_process(
    length: int, world_size: int
) -> None:
    """DeepSpeed #7384, #7868, #5177; vllm-omni #492: exactly the input's length comes back."""
    splits = balanced_split_sizes(length, world_size)
    whole = whole_inputs(length, (world_size, world_size))
    simulation = simulate(world_size, lambda group: layer(group, whole, splits))
    assert_same_bits(torch.cat(simulation.results), per_head(*whole))


def test_56700_tokens_on_8_ranks_lose_none() -> None:
    """VeOmni #61, #1139: floor division drops the last tokens."""
    splits = balanced_split_sizes(56700, 8)
    whole = torch.arange(56700 * 8, dtype=torch.int32).view(56700, 8, 1)

    def step(group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        local = whole.split(splits)[group.rank()]
        (received,) = scatter_heads_gather_seqlen([local], splits, group)
        return received, scatter_seqlen_gather_heads(received.contiguous(), splits, group)

    simulation = simulate(8, step)
    assert_same_bits(torch.cat([received for received, _ in simulation.results], dim=1), whole)
    assert_same_bits(torch.cat([back for _, back in simulation.results]), whole)


def test_two_models_with_other_head_counts_do_not_share_state() -> None:
    """DeepSpeed #8291, #8316: the KV head count of one model must not serve the next."""
    splits = balanced_split_sizes(11, 4)
    models = [(8, 8), (8, 4), (16, 4)]
    inputs = [whole_inputs(11, heads, seed) for seed, heads in enumerate(models)]

    def step(group: dist.ProcessGroup) -> list[torch.Tensor]:
        return [layer(group, whole, splits) for _ in range(2) for whole in inputs]

    by_rank = simulate(4, step).results
    for index in range(2 * len(models)):
        whole = inputs[index % len(models)]
        joined = torch.cat([results[index] for results in by_rank])
        assert_same_bits(joined, per_head(*expand_kv(*whole)))


def test_an_input_that_was_never_sharded_is_refused_before_data_moves() -> None:
    """vllm-omni #6841: it would make a sequence W times too long."""
    splits = balanced_split_sizes(12, 4)

    def step(group: dist.ProcessGroup) -> list[torch.Tensor]:
        return scatter_heads_gather_seqlen([torch.zeros(12, 4, HEAD_DIM)], splits, group)

    with pytest.raises(ValueError, match=r"12 tokens.*split_sizes\[0\]=3"):
        simulate(4, step)


def test_a_missing_group_is_the_default_group_and_data_moves() -> None:
    """Megatron-Bridge #2667: each rank attended to its own slice, and nothing complained."""
    splits = [3, 2, 0, 1]
    whole = whole_inputs(6, (4, 4))

    def program() -> torch.Tensor:
        local = [tensor.split(splits)[dist.get_rank()] for tensor in whole]
        received = scatter_heads_gather_seqlen(local, splits, None)
        return scatter_seqlen_gather_heads(per_head(*received), splits, None)

    simulation = simulate_world(4, program)
    assert_same_bits(torch.cat(simulation.results), per_head(*whole))
    for call in calls_of(simulation):
        moved = [
            nbytes
            for source, row in enumerate(call.bytes_by_pair)
            for destination, nbytes in enumerate(row)
            if source != destination
        ]
        assert sum(moved) > 0


@pytest.mark.parametrize("empty", [{0}, {1}, {3}, {0, 1, 2, 3}, {0, 3}], ids=str)
def test_ranks_without_tokens_neither_hang_nor_leak(empty: set[int]) -> None:
    """pytorch #146468, #103140; torchcomms #2632: zero-size messages hang, or yield NaN."""
    splits = [0 if rank in empty else 2 for rank in range(4)]

    def step(group: dist.ProcessGroup) -> list[torch.Tensor]:
        ones = torch.ones(splits[group.rank()], 4, HEAD_DIM, dtype=BF16)
        received = scatter_heads_gather_seqlen([ones, ones], splits, group)
        packed = scatter_heads_gather_seqlen(pack_head_shards([ones, ones], 4), splits, group)
        back = scatter_seqlen_gather_heads(received[0].contiguous(), splits, group)
        return [*received, *packed, back]

    for rank, (*received, back) in enumerate(simulate(4, step).results):
        assert back.shape == (splits[rank], 4, HEAD_DIM)
        for result in received:
            assert result.shape == (sum(splits), 1, HEAD_DIM)
        assert all((result == 1).all() for result in (*received, back))


def test_a_float32_query_does_not_turn_bfloat16_keys_into_float32() -> None:
    """yunchang packed, xfuser combined, SGLang packed, ringmaster; not in the keeping mode here."""
    splits = (3, 1)
    inputs = cases.inputs_of_all(splits, cases.Heads((1, 1, 1), (FP32, BF16, BF16)))

    def step(group: dist.ProcessGroup) -> list[torch.Tensor]:
        return scatter_heads_gather_seqlen(inputs[group.rank()], splits, group, keep_dtypes=True)

    simulation = simulate(2, step)
    assert len(calls_of(simulation)) == 1
    for rank, results in enumerate(simulation.results):
        assert [result.dtype for result in results] == [FP32, BF16, BF16]
        expected = reference.scatter_heads_one_by_one(inputs, rank)
        for result, want in zip(results, expected, strict=True):
            assert_same_bits(result, want)


def test_every_result_has_exactly_the_declared_length() -> None:
    """Several fused paths and DTensor give a rank a tensor of the wrong length, without error."""
    for splits in ([5, 0, 3], [1, 1, 1], [0, 0, 7], [2, 9, 4]):

        def step(group: dist.ProcessGroup, splits: list[int] = splits) -> list[torch.Size]:
            local = torch.zeros(splits[group.rank()], 6, HEAD_DIM)
            received = scatter_heads_gather_seqlen([local, local], splits, group)
            output = received[0].contiguous()
            shards = scatter_seqlen_gather_head_shards(output, splits, group)
            flat = scatter_seqlen_gather_heads(output, splits, group)
            return [result.shape for result in (*received, shards, flat)]

        for rank, shapes in enumerate(simulate(3, step).results):
            assert shapes == [
                (sum(splits), 2, HEAD_DIM),
                (sum(splits), 2, HEAD_DIM),
                (splits[rank], 3, 2, HEAD_DIM),
                (splits[rank], 6, HEAD_DIM),
            ]


def test_splits_that_do_not_add_up_are_refused() -> None:
    def step(group: dist.ProcessGroup) -> torch.Tensor:
        return scatter_seqlen_gather_heads(torch.zeros(11, 2, HEAD_DIM), [5, 5], group)

    with pytest.raises(ValueError, match=r"11 tokens.*\[5, 5\].*10"):
        simulate(2, step)


def says_5_where_others_say_6(group: Any, validate: bool | timedelta) -> tuple[str, float]:
    splits = [4, 5 if group.rank() == 1 else 6]
    start = time.monotonic()
    try:
        scatter_heads_gather_seqlen(
            [torch.zeros(splits[group.rank()], 2, HEAD_DIM)], splits, group, validate=validate
        )
    except RankDisagreementError as error:
        return str(error), time.monotonic() - start
    return "went unnoticed", 0.0


def test_splits_that_differ_between_ranks_are_one_error_on_the_simulator() -> None:
    """pytorch #117486: there all ranks wait. On the simulator an error with or without checking."""
    with pytest.raises(RuntimeError, match=r"rank 0 sends 4 rows|split sizes|rank 1"):
        simulate(2, lambda group: says_5_where_others_say_6(group, False))
    texts = {text for text, _ in simulate(2, lambda g: says_5_where_others_say_6(g, True)).results}
    (text,) = texts
    for word in ("[4, 6]", "[4, 5]", "rank 0", "rank 1"):
        assert word in text


@pytest.mark.gloo
def test_splits_that_differ_between_ranks_are_one_error_on_real_processes() -> None:
    """The same within a second on gloo, where it would end the process with SIGABRT."""
    reports = run_ranks(says_5_where_others_say_6, 2, True)
    assert len({text for text, _ in reports}) == 1
    for text, seconds in reports:
        assert "[4, 5]" in text
        assert "rank 1" in text
        assert seconds < 1


def test_one_rank_in_another_dtype_is_an_error_on_all_ranks() -> None:
    """ms-swift #9551: ranks with other dtypes hang."""

    def step(group: dist.ProcessGroup) -> str:
        dtype = FP32 if group.rank() == 2 else BF16
        tensor = torch.zeros(2, 3, HEAD_DIM, dtype=dtype)
        with pytest.raises(
            RankDisagreementError, match=r"float32.*rank 2|rank 2.*float32"
        ) as error:
            scatter_heads_gather_seqlen([tensor], [2, 2, 2], group, validate=True)
        return str(error.value)

    assert len(set(simulate(3, step).results)) == 1


def awkward_forms(tokens: int, heads: int, seed: int) -> dict[str, torch.Tensor]:
    """Non-contiguous tensors `[tokens, heads, HEAD_DIM]` of random bits."""
    dense = random_bits((tokens, heads, HEAD_DIM), BF16, seed)
    return {
        "transposed": dense.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        "sliced": random_bits((tokens, heads + 2, HEAD_DIM), BF16, seed)[:, 1:-1],
        "every second token": random_bits((2 * tokens, heads, HEAD_DIM), BF16, seed)[::2],
        "expanded": random_bits((tokens, 1, HEAD_DIM), BF16, seed).expand(-1, heads, -1),
        "stride 0 everywhere": random_bits((1, 1, 1), BF16, seed).expand(tokens, heads, HEAD_DIM),
    }


@pytest.mark.parametrize("form", awkward_forms(2, 2, 0))
def test_awkward_strides_are_right_or_refused(form: str) -> None:
    """pytorch #141816, #94907, #79747; verl #7137: refused, or filled wrongly."""
    splits = (4, 3)
    inputs = [
        [awkward_forms(tokens, heads, 10 * rank + heads)[form] for heads in (2, 4, 2)]
        for rank, tokens in enumerate(splits)
    ]

    def step(group: dist.ProcessGroup) -> list[torch.Tensor]:
        with pytest.raises(ValueError, match="contiguous"):
            scatter_seqlen_gather_heads(awkward_forms(7, 2, 1)[form], splits, group)
        return scatter_heads_gather_seqlen(inputs[group.rank()], splits, group)

    for rank, results in enumerate(simulate(2, step).results):
        expected = reference.scatter_heads_results(inputs, rank)
        for result, want in zip(results, expected, strict=True):
            assert_same_bits(result, want, f"{form}, rank {rank}")


def test_ranks_that_take_different_paths_send_the_same_bytes() -> None:
    """FastVideo #1807: which path a rank takes is its own business, whatever it did before."""
    splits = (3, 2, 4)
    inputs = cases.inputs_of_all(splits, cases.of_one_dtype((2, 1, 1), BF16))

    def step(group: dist.ProcessGroup) -> list[list[torch.Tensor]]:
        rank, results = group.rank(), []
        for turn in range(3):
            tensors = inputs[rank]
            if (rank + turn) % 3 == 0:
                tensors = pack_head_shards(tensors, 3)
            elif (rank + turn) % 3 == 1:
                tensors = [tensor.unflatten(1, (3, -1)) for tensor in tensors]
            results.append(scatter_heads_gather_seqlen(tensors, splits, group))
        return results

    simulation = simulate(3, step)
    for rank, turns in enumerate(simulation.results):
        for results in turns:
            for result, want in zip(
                results, reference.scatter_heads_results(inputs, rank), strict=True
            ):
                assert_same_bits(result, want, f"rank {rank}")
    first, *rest = calls_of(simulation)
    assert all(call.bytes_by_pair == first.bytes_by_pair for call in rest)


@pytest.mark.parametrize("heads", [(8, 8), (8, 4)], ids=["MHA", "GQA"])
@pytest.mark.parametrize("packed", [False, True])
def test_q_k_and_v_travel_in_one_collective(heads: tuple[int, int], packed: bool) -> None:
    """verl #7417-#7419, TensorRT-LLM #12774: packed input costs no copy, GQA no second exchange."""
    splits = [2, 3, 1, 1]
    whole = whole_inputs(7, heads)

    def step(group: dist.ProcessGroup) -> list[torch.Tensor]:
        local = [tensor.split(splits)[group.rank()] for tensor in whole]
        if packed:
            local = pack_head_shards(local, 4)
        return scatter_heads_gather_seqlen(local, splits, group)

    (call,) = calls_of(simulate(4, step))
    assert (sum(call.copied_bytes) == 0) == packed


@pytest.mark.parametrize("validate", [False, True])
def test_n_layers_make_exactly_2n_collectives(validate: bool) -> None:
    """accelerate #4209, vllm-omni #5717, #7120: lengths were gathered anew in every layer."""
    splits, layers = [2, 0, 3], 5

    def step(group: dist.ProcessGroup) -> torch.Tensor:
        hidden = torch.ones(splits[group.rank()], 3, HEAD_DIM)
        for _ in range(layers):
            q, k, v = scatter_heads_gather_seqlen(
                [hidden, hidden, hidden], splits, group, validate=validate
            )
            hidden = scatter_seqlen_gather_heads(
                (q + k + v).contiguous(), splits, group, validate=validate
            )
        return hidden

    simulation = simulate(3, step)
    assert [call.kind for call in calls_of(simulation)] == ["all_to_all_single"] * (2 * layers)
    for hidden in simulation.results:
        assert (hidden == 3.0**layers).all()


@pytest.mark.parametrize(
    ("call", "numbers"),
    [
        (lambda g: scatter_heads_gather_seqlen([torch.zeros(2, 7, 4)], [2] * 4, g), ["7", "4"]),
        (lambda g: scatter_heads_gather_seqlen([torch.zeros(3, 8, 4)], [2] * 4, g), ["3", "2"]),
        (lambda g: scatter_heads_gather_seqlen([torch.zeros(2, 8, 4)], [2] * 3, g), ["3", "4"]),
        (lambda g: scatter_seqlen_gather_heads(torch.zeros(9, 8, 4), [2] * 4, g), ["9", "8"]),
        (lambda g: pack_head_shards([torch.zeros(2, 7, 4)], 4), ["7", "4"]),
    ],
)
def test_every_refusal_holds_both_numbers(
    call: Callable[[dist.ProcessGroup], Any], numbers: list[str]
) -> None:
    """MAGI-1 #38, #61: an assertion without a message when the degrees do not multiply."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the numbers are checked below
        simulate(4, call)
    assert [number for number in numbers if number not in str(caught.value)] == []
