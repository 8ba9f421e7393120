"""Head shards that tile one send buffer are sent where they lie; whatever only looks so is copied.

Zero copies are proven by address: the collective gets the very memory of the head shards.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests import cases, reference
from tests.bits import TEST_DEVICE, assert_same_bits
from tests.cases import BF16, FP32, HEAD_DIM
from tests.near_misses import COUNTS, WORLD, near_misses, one_token_major_buffer
from tests.spy import OperatorLog, SpyGroup, exchange_with_spies
from tests.traffic import calls_of
from ulysses_comm import (
    as_send_buffer,
    empty_head_shards,
    pack_head_shards,
    scatter_heads_gather_seqlen,
    simulate,
)

SPLITS = (5, 4, 4, 4)


@pytest.mark.parametrize(("world_size", "splits"), cases.WORLDS_AND_SPLITS, ids=cases.split_name)
@pytest.mark.parametrize("heads", cases.PACKED_HEADS, ids=cases.split_name)
@pytest.mark.parametrize("keep_dtypes", [False, True], ids=["promote", "keep"])
def test_packed_head_shards_are_sent_in_place_on_every_rank(
    world_size: int, splits: tuple[int, ...], heads: cases.Heads, keep_dtypes: bool
) -> None:
    inputs = cases.inputs_of_all(splits, heads)
    packs = [pack_head_shards(tensors, world_size) for tensors in inputs]

    def step(group: dist.ProcessGroup) -> list[torch.Tensor]:
        views = packs[group.rank()]
        return scatter_heads_gather_seqlen(views, splits, group, keep_dtypes=keep_dtypes)

    simulation = simulate(world_size, step)

    (call,) = calls_of(simulation)
    for rank, results in enumerate(simulation.results):
        if splits[rank]:
            assert call.send_addresses[rank] == packs[rank][0].data_ptr()
        assert call.copied_bytes[rank] == 0
        expected = reference.scatter_heads_results(inputs, rank)
        for result, want in zip(results, expected, strict=True):
            assert_same_bits(result, want, f"rank {rank}", strides=True)


@pytest.mark.parametrize(("world_size", "splits"), cases.WORLDS_AND_SPLITS, ids=cases.split_name)
@pytest.mark.parametrize("heads", cases.PACKED_HEADS, ids=cases.split_name)
def test_in_place_send_runs_no_operator_but_views(
    world_size: int, splits: tuple[int, ...], heads: cases.Heads
) -> None:
    for rank in range(world_size):
        tensors = cases.inputs_of_rank(rank, splits, heads)
        views = pack_head_shards(tensors, world_size)
        group = SpyGroup(rank, world_size)
        with OperatorLog() as log:
            results = scatter_heads_gather_seqlen(views, splits, group)
        assert log.moved() == []
        assert group.script.copied_bytes in ([], [(0, False)])
        (sent,) = group.sent
        if splits[rank]:
            assert sent.address == views[0].data_ptr()
        expected = reference.scatter_heads_send_buffer(tensors, world_size)
        assert_same_bits(sent.content, expected.flatten(0, 1), f"send buffer of rank {rank}")
        assert (sent.input_split_sizes, sent.output_split_sizes) == (
            reference.scatter_heads_split_sizes(splits, rank)
        )
        assert all(
            result.data_ptr() != view.data_ptr()
            for result, view in zip(results, views, strict=True)
        ) or (not sum(splits))


def by_hand(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    buffer = reference.scatter_heads_send_buffer(inputs, WORLD)
    return list(buffer.permute(1, 0, 2, 3).split(COUNTS, dim=2))


def written_with_out(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    tokens, dtype = inputs[0].shape[0], inputs[0].dtype
    views = empty_head_shards(tokens, WORLD, COUNTS, HEAD_DIM, dtype, TEST_DEVICE)
    for view, tensor in zip(views, inputs, strict=True):
        view.copy_(tensor.unflatten(1, (WORLD, -1)))
    return views


def packed_without_grad(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    with torch.no_grad():
        return pack_head_shards([tensor.requires_grad_() for tensor in inputs], WORLD)


def detached_from_a_tracked_pack(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    views = pack_head_shards([tensor.requires_grad_() for tensor in inputs], WORLD)
    assert all(view.requires_grad for view in views)
    return [view.detach() for view in views]


def packed_in_inference_mode(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    with torch.inference_mode():
        return pack_head_shards(inputs, WORLD)


def with_a_clone_of_the_views(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Other tensor objects, the same memory."""
    return [view[:].view_as(view) for view in pack_head_shards(inputs, WORLD)]


@pytest.mark.parametrize(
    "make",
    [by_hand, written_with_out, packed_without_grad, detached_from_a_tracked_pack,
     packed_in_inference_mode, with_a_clone_of_the_views],
    ids=lambda make: make.__name__,
)  # fmt: skip
@pytest.mark.parametrize("tokens", [5, 1])
def test_whatever_tiles_one_buffer_is_sent_in_place(
    make: Callable[[list[torch.Tensor]], list[torch.Tensor]], tokens: int
) -> None:
    splits = (tokens, 3, 0, 1)
    inputs = cases.inputs_of_rank(0, splits, cases.of_one_dtype(COUNTS, FP32))
    expected = reference.scatter_heads_send_buffer(inputs, WORLD).flatten(0, 1)
    views = make(inputs)
    buffer = as_send_buffer(views, WORLD)
    assert buffer is not None
    assert buffer.is_contiguous()
    assert buffer.data_ptr() == views[0].data_ptr()
    assert_same_bits(buffer.flatten(0, 1), expected)

    group = SpyGroup(0, WORLD)
    scatter_heads_gather_seqlen(views, splits, group)
    (sent,) = group.sent
    assert sent.address == views[0].data_ptr()
    assert_same_bits(sent.content, expected)


def test_a_buffer_can_be_sent_again_after_new_content() -> None:
    views = empty_head_shards(5, WORLD, COUNTS, HEAD_DIM, BF16, TEST_DEVICE)
    for seed in range(3):
        inputs = cases.inputs_of_rank(0, SPLITS, cases.of_one_dtype(COUNTS, BF16), seed=seed)
        for view, tensor in zip(views, inputs, strict=True):
            view.copy_(tensor.unflatten(1, (WORLD, -1)))
        group = SpyGroup(0, WORLD)
        scatter_heads_gather_seqlen(views, SPLITS, group)
        assert group.sent[0].address == views[0].data_ptr()
        expected = reference.scatter_heads_send_buffer(inputs, WORLD)
        assert_same_bits(group.sent[0].content, expected.flatten(0, 1))


@pytest.mark.parametrize("name", near_misses)
def test_near_miss_is_copied_and_right(name: str) -> None:
    make = near_misses[name]
    shards = [make(tokens) for tokens in SPLITS]
    # A token-major copy of the values says what the near miss means.
    inputs = [[flat(view).resolve_conj().clone() for view in views] for views in shards]
    results, sent = exchange_with_spies(
        WORLD, lambda group: scatter_heads_gather_seqlen(shards[group.rank()], SPLITS, group)
    )
    for rank, views in enumerate(shards):
        assert as_send_buffer(views, WORLD) is None
        for view in views:
            start = view.untyped_storage().data_ptr()
            inside = start <= sent[rank].address < start + view.untyped_storage().nbytes()
            assert not inside, f"rank {rank} sent its input in place"
        for result, want in zip(
            results[rank], reference.scatter_heads_results(inputs, rank), strict=True
        ):
            assert_same_bits(result, want, f"{name}, rank {rank}", strides=True)


@pytest.mark.parametrize("name", near_misses)
@pytest.mark.parametrize("splits", [(0, 3, 0, 1), (1, 1, 1, 1), (4, 4, 4, 4)], ids=cases.split_name)
def test_near_miss_is_right_where_shapes_degenerate(name: str, splits: tuple[int, ...]) -> None:
    """With 0 or 1 tokens, or as many as ranks, some near misses do tile: only bytes count."""
    make = near_misses[name]
    shards = [make(tokens) for tokens in splits]
    inputs = [[flat(view).resolve_conj().clone() for view in views] for views in shards]

    def step(group: dist.ProcessGroup) -> list[torch.Tensor]:
        return scatter_heads_gather_seqlen(shards[group.rank()], splits, group)

    for rank, results in enumerate(simulate(WORLD, step).results):
        for result, want in zip(
            results, reference.scatter_heads_results(inputs, rank), strict=True
        ):
            assert_same_bits(result, want, f"{name}, rank {rank}", strides=True)


def test_as_many_tokens_as_ranks_does_not_confuse_the_axes() -> None:
    """At S_r = W a token-major buffer has the shape of a send buffer, so only strides tell."""
    shards = [one_token_major_buffer(WORLD) for _ in range(WORLD)]
    for views in shards:
        assert as_send_buffer(views, WORLD) is None


def leaves_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.clone().requires_grad_() for tensor in tensors]


def test_a_tracked_pack_of_our_own_is_sent_in_place_and_gradients_arrive() -> None:
    """The exchange's own autograd function sees this send, so that nothing is hidden."""
    inputs = cases.inputs_of_all(SPLITS, cases.of_one_dtype(COUNTS, FP32))
    leaves = [leaves_of(tensors) for tensors in inputs]
    packs = [pack_head_shards(tensors, WORLD) for tensors in leaves]

    def step(group: dist.ProcessGroup) -> list[torch.Tensor]:
        results = scatter_heads_gather_seqlen(packs[group.rank()], SPLITS, group)
        torch.autograd.backward(results, [torch.ones_like(r) * (1 + group.rank()) for r in results])
        return results

    simulation = simulate(WORLD, step)
    forward, _ = calls_of(simulation)
    for rank, results in enumerate(simulation.results):
        assert as_send_buffer(packs[rank], WORLD) is None, "in place only through the exchange"
        assert forward.send_addresses[rank] == packs[rank][0].data_ptr()
        assert forward.copied_bytes[rank] == 0
        for result, want in zip(
            results, reference.scatter_heads_results(inputs, rank), strict=True
        ):
            assert result.requires_grad
            assert_same_bits(result, want, f"rank {rank}", strides=True)
        for leaf, count in zip(leaves[rank], COUNTS, strict=True):
            # Heads of rank r got the gradient 1 + r.
            want = (
                torch.arange(1.0, WORLD + 1, device=TEST_DEVICE)
                .repeat_interleave(count)
                .view(1, -1, 1)
            )
            assert leaf.grad is not None
            assert_same_bits(leaf.grad, want.expand_as(leaf))


class PassOn(torch.autograd.Function):
    """Another function's view of the same memory."""

    @staticmethod
    def forward(ctx: object, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return grad


def marked_by_hand(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """The geometry fits, and nothing but the flag says that autograd looks on."""
    return [view.requires_grad_() for view in pack_head_shards([t.detach() for t in leaves], WORLD)]


def one_of_them_marked(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    q, k, v = pack_head_shards([leaf.detach() for leaf in leaves], WORLD)
    return [q, k.requires_grad_(), v]


def through_another_function(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    return [PassOn.apply(view) for view in pack_head_shards(leaves, WORLD)]


def one_through_another_function(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    q, k, v = pack_head_shards(leaves, WORLD)
    return [q, k, PassOn.apply(v)]


def viewed_again(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    return [view[:] for view in pack_head_shards(leaves, WORLD)]


def reordered_pack(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    q, k, v = leaves
    packed_v, packed_k, packed_q = pack_head_shards([v, k, q], WORLD)
    return [packed_q, packed_k, packed_v]


def two_packs(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    return [*pack_head_shards(leaves[:2], WORLD), *pack_head_shards(leaves[2:], WORLD)]


def part_of_a_pack(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    return pack_head_shards([*leaves, leaves[0]], WORLD)[:3]


def packed_for_other_ranks(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    return pack_head_shards(leaves, WORLD // 2)


def made_by_the_caller(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    buffer = torch.cat([leaf.unflatten(1, (WORLD, -1)).transpose(0, 1) for leaf in leaves], dim=2)
    return list(buffer.transpose(0, 1).split(COUNTS, dim=2))


@pytest.mark.parametrize(
    "make",
    [marked_by_hand, one_of_them_marked, through_another_function, one_through_another_function,
     viewed_again, reordered_pack, two_packs, part_of_a_pack, packed_for_other_ranks,
     made_by_the_caller],
    ids=lambda make: make.__name__,
)  # fmt: skip
def test_other_tracked_head_shards_are_copied_and_gradients_arrive(
    make: Callable[[list[torch.Tensor]], list[torch.Tensor]],
) -> None:
    counts = (2, 2, 2) if make is packed_for_other_ranks else COUNTS
    inputs = cases.inputs_of_all(SPLITS, cases.of_one_dtype(counts, FP32))
    leaves = [leaves_of(tensors) for tensors in inputs]
    shards = [make(tensors) for tensors in leaves]
    of_leaves = make not in (marked_by_hand, one_of_them_marked)

    def step(group: dist.ProcessGroup) -> list[torch.Tensor]:
        views = shards[group.rank()]
        results = scatter_heads_gather_seqlen(views, SPLITS, group)
        torch.autograd.backward(results, [torch.ones_like(r) * (1 + group.rank()) for r in results])
        return results

    simulation = simulate(WORLD, step)
    forward = calls_of(simulation)[0]
    for rank, results in enumerate(simulation.results):
        assert as_send_buffer(shards[rank], WORLD) is None
        for view in shards[rank]:
            start = view.untyped_storage().data_ptr()
            stop = start + view.untyped_storage().nbytes()
            assert not start <= forward.send_addresses[rank] < stop, "sent in place"
        for result, want in zip(
            results, reference.scatter_heads_results(inputs, rank), strict=True
        ):
            assert_same_bits(result, want, f"rank {rank}", strides=True)
        tracked = leaves[rank] if of_leaves else [v for v in shards[rank] if v.is_leaf]
        for tensor in (tensor for tensor in tracked if tensor.requires_grad):
            heads = tensor.shape[1:-1].numel() // WORLD
            want = (
                torch.arange(1.0, WORLD + 1, device=TEST_DEVICE)
                .repeat_interleave(heads)
                .view(1, -1, 1)
            )
            assert tensor.grad is not None
            grad = flat(tensor.grad)
            assert_same_bits(grad, want.expand_as(grad))


def flat(view: torch.Tensor) -> torch.Tensor:
    return view.detach().reshape(view.shape[0], view.shape[1:-1].numel(), view.shape[-1])
