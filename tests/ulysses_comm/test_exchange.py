"""Both exchanges against the plain formulation, bit for bit: what is sent, and what comes out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import cases, reference
from tests.bits import (
    SPECIAL_PATTERNS,
    TEST_DEVICE,
    assert_same_bits,
    bits_of,
    long_axes,
    random_bits,
)
from tests.cases import BF16, FP16, FP32, HEAD_DIM
from tests.spy import OperatorLog, SpyGroup, exchange_with_spies
from tests.traffic import calls_of
from ulysses_comm import (
    LONE_RANK,
    pack_head_shards,
    scatter_heads_gather_seqlen,
    scatter_seqlen_gather_head_shards,
    scatter_seqlen_gather_heads,
    simulate,
)

every_split = pytest.mark.parametrize(
    ("world_size", "splits"), cases.WORLDS_AND_SPLITS, ids=cases.split_name
)
every_head_count = pytest.mark.parametrize("heads", cases.HEADS, ids=cases.split_name)
every_output = pytest.mark.parametrize(
    ("num_heads", "dtype"), [(3, BF16), (6, BF16), (1, FP32), (2, FP16)], ids=str
)


@every_split
@every_head_count
def test_send_buffer_equals_permute_and_concatenate(
    world_size: int, splits: tuple[int, ...], heads: cases.Heads
) -> None:
    inputs = cases.inputs_of_all(splits, heads)
    for rank in range(world_size):
        group = SpyGroup(rank, world_size)
        scatter_heads_gather_seqlen(inputs[rank], splits, group)

        (sent,) = group.sent
        expected = reference.scatter_heads_send_buffer(inputs[rank], world_size)
        assert sent.contiguous
        assert_same_bits(sent.content, expected.flatten(0, 1), f"send buffer of rank {rank}")
        assert (sent.input_split_sizes, sent.output_split_sizes) == (
            reference.scatter_heads_split_sizes(splits, rank)
        )


@every_split
@every_head_count
def test_heads_are_scattered_and_tokens_gathered(
    world_size: int, splits: tuple[int, ...], heads: cases.Heads
) -> None:
    inputs = cases.inputs_of_all(splits, heads)

    def step(group: dist.ProcessGroup) -> list[torch.Tensor]:
        return scatter_heads_gather_seqlen(inputs[group.rank()], splits, group)

    simulation = simulate(world_size, step)

    (call,) = calls_of(simulation)
    for rank, results in enumerate(simulation.results):
        expected = reference.scatter_heads_results(inputs, rank)
        own_dtype = reference.scatter_heads_one_by_one(inputs, rank)
        assert isinstance(results, list)
        assert len(results) == len(expected)
        for index, (result, want, whole) in enumerate(
            zip(results, expected, own_dtype, strict=True)
        ):
            what = f"input {index} on rank {rank}"
            assert_same_bits(result, want, what, strides=True)
            assert_same_bits(result, whole.to(result.dtype), what)
        assert_views_of_one_buffer(results)
        sent = reference.scatter_heads_send_buffer(inputs[rank], world_size)
        assert call.copied_bytes[rank] == sent.nbytes


@every_split
@every_output
def test_attention_output_goes_back_to_the_owners_of_its_tokens(
    world_size: int, splits: tuple[int, ...], num_heads: int, dtype: torch.dtype
) -> None:
    outputs = cases.attention_outputs(splits, num_heads, dtype)

    def step(group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        output = outputs[group.rank()]
        shards = scatter_seqlen_gather_head_shards(output, splits, group)
        return shards, scatter_seqlen_gather_heads(output, splits, group)

    simulation = simulate(world_size, step)

    first, second = calls_of(simulation)
    for rank, (shards, flat) in enumerate(simulation.results):
        expected = reference.scatter_seqlen_head_shards(outputs, splits, rank)
        width = num_heads * HEAD_DIM
        assert_same_bits(shards, expected, f"head shards of rank {rank}", strides=True)
        assert_strides(shards, (width, splits[rank] * width, HEAD_DIM, 1))
        # One head per rank, or one token, flattens without a copy; anything else with one.
        assert_same_bits(flat, expected.flatten(1, 2), f"flat result of rank {rank}", strides=True)
        assert_same_bits(flat, reference.scatter_seqlen_heads(outputs, splits, rank))
        assert first.copied_bytes[rank] == 0
        assert second.copied_bytes[rank] == (
            flat.nbytes if num_heads > 1 and splits[rank] > 1 else 0
        )
        if sum(splits):
            assert first.send_addresses[rank] == outputs[rank].data_ptr()
            assert second.send_addresses[rank] == outputs[rank].data_ptr()


@every_split
@every_output
def test_output_exchange_sends_its_input_as_it_lies(
    world_size: int, splits: tuple[int, ...], num_heads: int, dtype: torch.dtype
) -> None:
    outputs = cases.attention_outputs(splits, num_heads, dtype)
    for exchange in (scatter_seqlen_gather_head_shards, scatter_seqlen_gather_heads):
        for rank in range(world_size):
            group = SpyGroup(rank, world_size)
            exchange(outputs[rank], splits, group)
            (sent,) = group.sent
            assert sent.address == outputs[rank].data_ptr()
            assert_same_bits(sent.content, outputs[rank], f"sent by rank {rank}")
            assert (sent.input_split_sizes, sent.output_split_sizes) == (
                reference.scatter_seqlen_split_sizes(splits, rank)
            )


def test_output_exchange_sends_a_contiguous_part_of_a_larger_buffer_in_place() -> None:
    splits = (3, 0, 4)
    larger = [random_bits((20, 2, HEAD_DIM), BF16, rank) for rank in range(3)]
    outputs = [buffer[5 : 5 + sum(splits)] for buffer in larger]
    results, sent = exchange_with_spies(
        3, lambda group: scatter_seqlen_gather_heads(outputs[group.rank()], splits, group)
    )
    for rank in range(3):
        assert sent[rank].address == outputs[rank].data_ptr() != larger[rank].data_ptr()
        expected = reference.scatter_seqlen_heads(outputs, splits, rank)
        assert_same_bits(results[rank], expected, f"rank {rank}")


def test_lazily_conjugated_output_arrives_conjugated() -> None:
    """A conjugated view is contiguous, but its memory holds other values."""
    splits = (2, 3)
    outputs = [torch.randn(5, 1, 4, dtype=torch.complex64).conj() for _ in range(2)]
    plain = [output.resolve_conj() for output in outputs]
    results, _ = exchange_with_spies(
        2, lambda group: scatter_seqlen_gather_head_shards(outputs[group.rank()], splits, group)
    )
    for rank in range(2):
        expected = reference.scatter_seqlen_head_shards(plain, splits, rank)
        assert_same_bits(results[rank].resolve_conj(), expected, f"rank {rank}")


@pytest.mark.parametrize("dtype", list(SPECIAL_PATTERNS), ids=str)
@pytest.mark.parametrize("layout", ["separate", "packed"])
def test_special_values_survive_both_exchanges(dtype: torch.dtype, layout: str) -> None:
    """NaN payloads, infinities, -0.0, subnormals and the largest values, signalling NaNs too."""
    splits = (3, 0, 2)
    patterns = SPECIAL_PATTERNS[dtype]
    heads = cases.of_one_dtype((2, 1, 1), dtype)
    inputs = cases.inputs_of_all(splits, heads)

    def step(group: dist.ProcessGroup) -> tuple[Any, ...]:
        tensors = inputs[group.rank()]
        if layout == "packed":
            tensors = pack_head_shards(tensors, 3)
        received = scatter_heads_gather_seqlen(tensors, splits, group)
        back = scatter_seqlen_gather_heads(received[0].contiguous(), splits, group)
        return received, back

    mask = (1 << (8 * dtype.itemsize)) - 1
    seen: set[int] = set()
    for rank, (received, back) in enumerate(simulate(3, step).results):
        expected = reference.scatter_heads_results(inputs, rank)
        for result, want in zip(received, expected, strict=True):
            assert_same_bits(result, want, f"rank {rank}")
            seen.update(value & mask for value in bits_of(result).flatten().tolist())
        assert_same_bits(back, inputs[rank][0], f"round trip of rank {rank}")
    assert set(patterns) <= seen, "the inputs did not hold every special value"


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
     torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2],
    ids=str,
)  # fmt: skip
def test_every_dtype_travels_unchanged(dtype: torch.dtype) -> None:
    splits = (2, 3)
    heads = cases.of_one_dtype((1, 2), dtype)
    inputs = cases.inputs_of_all(splits, heads, head_dim=3)

    def step(group: dist.ProcessGroup) -> tuple[Any, ...]:
        received = scatter_heads_gather_seqlen(inputs[group.rank()], splits, group)
        back = [scatter_seqlen_gather_heads(r.contiguous(), splits, group) for r in received]
        return received, back

    for rank, (received, back) in enumerate(simulate(2, step).results):
        for result, want in zip(
            received, reference.scatter_heads_one_by_one(inputs, rank), strict=True
        ):
            assert_same_bits(result, want, f"rank {rank}")
        for result, want in zip(back, inputs[rank], strict=True):
            assert_same_bits(result, want, f"round trip of rank {rank}")


@pytest.mark.parametrize("form", ["transposed", "sliced tokens", "sliced heads", "expanded",
                                  "stride 0 tokens", "every second channel"])  # fmt: skip
def test_non_contiguous_inputs_are_gathered_right(form: str) -> None:
    """pytorch #141816 and its like: the strides of q, k and v are the caller's business."""
    splits = (4, 2, 5)

    def strided(rank: int, heads: int, seed: int) -> torch.Tensor:
        tokens, width = splits[rank], 3 * heads
        if form == "transposed":
            return random_bits((HEAD_DIM, width, tokens), FP32, seed).permute(2, 1, 0)
        if form == "sliced tokens":
            return random_bits((2 * tokens + 1, width, HEAD_DIM), FP32, seed)[1::2]
        if form == "sliced heads":
            return random_bits((tokens, width + 4, HEAD_DIM), FP32, seed)[:, 2:-2]
        if form == "expanded":
            return random_bits((tokens, 1, HEAD_DIM), FP32, seed).expand(-1, width, -1)
        if form == "stride 0 tokens":
            return random_bits((1, width, HEAD_DIM), FP32, seed).expand(tokens, -1, -1)
        return random_bits((tokens, width, 2 * HEAD_DIM), FP32, seed)[..., ::2]

    inputs = [[strided(r, h, 7 * r + h) for h in (1, 2, 1)] for r in range(3)]
    results, sent = exchange_with_spies(
        3, lambda group: scatter_heads_gather_seqlen(inputs[group.rank()], splits, group)
    )
    for rank in range(3):
        expected = reference.scatter_heads_send_buffer(inputs[rank], 3).flatten(0, 1)
        assert_same_bits(sent[rank].content, expected, f"sent by rank {rank}")
        wanted = reference.scatter_heads_results(inputs, rank)
        for result, want in zip(results[rank], wanted, strict=True):
            assert_same_bits(result, want, f"rank {rank}", strides=True)


@pytest.mark.skipif(
    TEST_DEVICE != "cpu",
    reason="a GPU's pack is a Triton kernel; bench_exchange.py counts launches",
)
def test_each_input_is_copied_once_into_one_buffer() -> None:
    """The memory of an exchange is one send and one receive buffer, written once."""
    splits, rank = (5, 2, 3), 0
    inputs = cases.inputs_of_rank(rank, splits, cases.of_one_dtype((2, 1, 3), BF16))
    group = SpyGroup(rank, 3)
    torch.utils.deterministic.fill_uninitialized_memory = False
    with OperatorLog() as log:
        results = scatter_heads_gather_seqlen(inputs, splits, group)
    payload = sum(tensor.nbytes for tensor in inputs)
    received = results[0].untyped_storage().nbytes()
    assert sum(nbytes for _, nbytes in log.moved()) == payload, log.moved()
    assert len(log.moved()) == len(inputs)
    assert sorted(log.allocated_bytes()) == sorted([payload, received])


def test_no_input_gives_no_result_and_sends_nothing() -> None:
    group = SpyGroup(0, 4)
    assert scatter_heads_gather_seqlen([], (1, 2, 3, 4), group) == []
    assert group.sent == []
    assert scatter_heads_gather_seqlen([], (1,), LONE_RANK) == []


def test_one_input_is_enough_and_a_tuple_will_do() -> None:
    splits = (2, 1)
    inputs = cases.inputs_of_all(splits, cases.of_one_dtype((2,), FP32))
    results, _ = exchange_with_spies(
        2, lambda group: scatter_heads_gather_seqlen(tuple(inputs[group.rank()]), splits, group)
    )
    for rank in range(2):
        (result,) = results[rank]
        assert_same_bits(result, reference.scatter_heads_results(inputs, rank)[0])


def test_one_rank_neither_sends_nor_copies() -> None:
    group = SpyGroup(0, 1)
    tensors = cases.inputs_of_rank(0, (5,), cases.Heads((2, 1, 3), (BF16, FP32, BF16)))
    for lone in (group, None, LONE_RANK):
        with OperatorLog() as log:
            results = scatter_heads_gather_seqlen(tensors, [5], lone)
        assert [id(result) for result in results] == [id(tensor) for tensor in tensors]
        assert log.moved() == []
        output = random_bits((5, 4, HEAD_DIM), BF16, 1)
        with OperatorLog() as log:
            flat = scatter_seqlen_gather_heads(output, [5], lone)
            shards = scatter_seqlen_gather_head_shards(output, [5], lone)
        assert flat is output
        assert shards.shape == (5, 1, 4, HEAD_DIM)
        assert shards.data_ptr() == output.data_ptr()
        assert_same_bits(shards.squeeze(1), output, strides=True)
        assert log.moved() == []
    assert group.sent == []
    assert group.script.copied_bytes == []


@pytest.mark.parametrize("packed", [True, False])
def test_one_rank_flattens_head_shards(packed: bool) -> None:
    tensors = cases.inputs_of_rank(0, (5,), cases.of_one_dtype((2, 1, 3), BF16))
    shards = pack_head_shards(tensors, 1) if packed else [t.unsqueeze(1) for t in tensors]
    group = SpyGroup(0, 1)
    with OperatorLog() as log:
        results = scatter_heads_gather_seqlen(shards, [5], group)
    for result, shard, tensor in zip(results, shards, tensors, strict=True):
        assert_same_bits(result, tensor)
        assert result.data_ptr() == shard.data_ptr()
    assert log.moved() == []
    assert group.sent == []


def test_one_rank_flattens_head_shards_packed_for_many() -> None:
    tensors = cases.inputs_of_rank(0, (5,), cases.of_one_dtype((4, 8), BF16))
    results = scatter_heads_gather_seqlen(pack_head_shards(tensors, 4), [5], LONE_RANK)
    for result, tensor in zip(results, tensors, strict=True):
        assert_same_bits(result, tensor)


def test_unwritten_memory_never_shows() -> None:
    """A zero-size bf16 message once yielded NaN (torchcomms #2632): buffers start as NaN here."""
    assert torch.empty(4, dtype=BF16).isnan().all(), "the fixture must fill empty tensors"
    splits = (0, 3, 0, 2)
    heads = cases.of_one_dtype((1, 1, 1), BF16)
    inputs = [
        [torch.full((tokens, 4, HEAD_DIM), 1.0 + rank, dtype=BF16) for _ in heads.counts]
        for rank, tokens in enumerate(splits)
    ]

    def step(group: dist.ProcessGroup) -> tuple[Any, ...]:
        received = scatter_heads_gather_seqlen(inputs[group.rank()], splits, group)
        flat = scatter_seqlen_gather_heads(received[0].contiguous(), splits, group)
        return (*received, flat)

    for results in simulate(4, step).results:
        assert not any(result.isnan().any() for result in results)


def assert_views_of_one_buffer(results: list[torch.Tensor]) -> None:
    """Each result is the next slice of the head axis of one complete `[S, H, D]` buffer."""
    storage = results[0].untyped_storage()
    heads = sum(result.shape[1] for result in results)
    tokens, _, head_dim = results[0].shape
    assert storage.nbytes() == tokens * heads * head_dim * results[0].element_size()
    offset = 0
    for result in results:
        assert result.untyped_storage().data_ptr() == storage.data_ptr()
        assert result.storage_offset() == offset
        assert_strides(result, (heads * head_dim, head_dim, 1))
        offset += result.shape[1] * head_dim


def assert_strides(tensor: torch.Tensor, strides: tuple[int, ...]) -> None:
    """Check the strides of the axes longer than one; a tensor without elements has none."""
    if tensor.numel():
        expected = [(i, s) for i, s in enumerate(strides) if tensor.shape[i] > 1]
        assert long_axes(tensor) == expected
