"""Route blocks against a histogram, route by route; the Triton form is among `route_cases`."""

from __future__ import annotations

import pytest
import torch

from magi2.ops.expert_mlp import expert_mlp_torch
from magi2.ops.route_build import (
    build_routes_torch,
    empty_block_routes,
    number_experts,
    route_capacity,
)
from magi2.ops.token_permute import expert_order
from tests.bits import assert_same_bits
from tests.magi2.route_cases import assert_same_routes, histogram_routes, junk_routes
from tests.magi2.triton_cases import BF16, FP32, expert_inputs, head_major
from tests.spy import OperatorLog

LISTS = [
    [],
    [3],
    [2, 0, 2, 0, 2],
    [3] * 9 + [0, 3, 0],
    [1] * 8,
    [0] * 5,
    [4] * 3,
    [[0, 4], [1, 1], [4, 2]],
]


@pytest.mark.parametrize("ids", LISTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_blocks_equal_a_histogram_in_fresh_and_in_given_buffers(ids, dtype):
    expert = torch.tensor(ids, dtype=dtype)
    expected = histogram_routes(expert, 5, 4)
    assert_same_routes(build_routes_torch(expert, 5, 4), expected)
    junk = junk_routes(expected, "cpu")
    assert build_routes_torch(expert, 5, 4, junk) is junk
    assert_same_routes(junk, expected)


@pytest.mark.parametrize("routes", [1, 127, 5000, 14601])
def test_blocks_equal_a_histogram_on_skewed_routings(routes):
    expert = (torch.rand(routes).pow(4) * 768).int()
    built = build_routes_torch(expert, 768, 128)
    assert_same_routes(built, histogram_routes(expert, 768, 128))


def test_blocks_equal_a_histogram_on_two_thousand_random_routings():
    generator = torch.Generator().manual_seed(1)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    for _ in range(2000):
        experts, block, routes = draw(1, 9), 1 << draw(0, 5), draw(0, 40)
        expert = torch.randint(draw(0, experts), experts, (routes,), generator=generator)
        built = build_routes_torch(expert, experts, block)
        assert_same_routes(built, histogram_routes(expert, experts, block))


def test_live_slots_are_a_permutation_of_the_routes_and_the_tail_is_empty():
    choice = torch.rand(3, 37, 8).argsort(-1)[..., :2]
    built = build_routes_torch(number_experts(choice, 8), 24, 16)
    total = int(built.padded_total)
    slots = built.slots[built.slots < built.num_routes]
    assert torch.equal(slots.sort().values, torch.arange(222, dtype=torch.int32))
    assert (built.slots[total:] == 222).all()
    assert (built.block_expert[total // 16 :] == 24).all()
    assert total % 16 == 0


def test_routes_are_numbered_as_tokens_store_them():
    choice = torch.rand(3, 11, 8).argsort(-1)[..., :2]
    expert = number_experts(choice, 8)
    assert (expert.dtype, expert.is_contiguous(), expert.shape) == (torch.int32, True, (11, 3, 2))
    for t, h, k in ((0, 0, 0), (10, 2, 1), (4, 1, 0)):
        assert expert[t, h, k] == h * 8 + choice[h, t, k]
    order, _ = expert_order(choice, 8)
    slots = build_routes_torch(expert, 24, 4).slots
    assert torch.equal(slots[slots < 66].long(), order)


def test_the_numbering_of_a_route_changes_no_block():
    # Head-major numbers, as an older layout had them: the same routes in the same slots.
    choice = torch.rand(3, 29, 8).argsort(-1)[..., :2]
    expert = number_experts(choice, 8)
    token_major = build_routes_torch(expert, 24, 16)
    head_major = build_routes_torch(expert.permute(1, 0, 2).contiguous(), 24, 16)
    number = torch.arange(174).view(29, 3, 2)
    # Position in the head-major list to token-major number, and the sentinel to itself.
    to_token_major = torch.cat([number.permute(1, 0, 2).flatten(), torch.tensor([174])])
    assert torch.equal(token_major.slots.long(), to_token_major[head_major.slots.long()])
    assert torch.equal(token_major.block_expert, head_major.block_expert)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(
    "sizes",
    [(0, 3, 2, 4), (1, 1, 2, 4), (1, 3, 6, 8), (7, 3, 2, 4), (129, 2, 2, 4), (131, 3, 6, 8)],
)
def test_the_numbering_of_a_route_changes_no_output(sizes, dtype):
    inputs = expert_inputs((*sizes, 24, 40), dtype, "cpu")
    routes = expert_mlp_torch(*inputs)
    assert routes.is_contiguous()
    assert_same_bits(routes, head_major(expert_mlp_torch, inputs))


def test_capacity_is_enough_for_the_worst_routing_and_small_for_few_routes():
    assert route_capacity(266544, 768, 128) == 364160
    assert route_capacity(1, 3072, 128) == 128
    assert route_capacity(0, 3072, 128) == 0
    # One route for each expert wastes the most.
    built = build_routes_torch(torch.arange(6), 6, 4)
    assert int(built.padded_total) == built.slots.numel() == 24


def test_refuses_buffers_of_other_sizes_and_ids_that_are_no_integers():
    expert = torch.tensor([0, 1, 2])
    with pytest.raises(ValueError, match="expected at least 12 slots"):
        build_routes_torch(expert, 5, 4, empty_block_routes(2, 5, 4, "cpu"))
    with pytest.raises(ValueError, match="in blocks of 4"):
        build_routes_torch(expert, 5, 4, empty_block_routes(3, 5, 8, "cpu"))
    with pytest.raises(ValueError, match=r"expert is torch\.float32"):
        build_routes_torch(expert.float(), 5, 4)
    with pytest.raises(ValueError, match=r"less than 2\*\*31"):
        empty_block_routes(2**31, 5, 4, "meta")


def test_bigger_buffers_are_filled_to_their_end():
    expert = torch.tensor([2, 0, 2])
    big = empty_block_routes(3, 5, 4, "cpu")
    wide = junk_routes(big, "cpu")
    wide = type(wide)(
        slots=torch.full((40,), -7, dtype=torch.int32),
        block_expert=torch.full((10,), -7, dtype=torch.int32),
        padded_total=wide.padded_total,
        block_rows=4,
        num_routes=3,
    )
    build_routes_torch(expert, 5, 4, wide)
    assert wide.slots.tolist() == [1, 3, 3, 3, 0, 2, 3, 3] + [3] * 32
    assert wide.block_expert.tolist() == [0, 2] + [5] * 8


def test_the_build_adds_nothing_by_atomics_and_looks_at_no_number():
    expert = number_experts(torch.rand(3, 37, 8).argsort(-1)[..., :2], 8)
    with OperatorLog() as log:
        build_routes_torch(expert, 24, 16)
    used = {name.removeprefix("aten::").rstrip("_") for name in log.names()}
    assert {"sort", "searchsorted", "cumsum"} <= used
    # What adds where indices meet, and what brings a number to the host.
    racing = {"bincount", "histc", "index_add", "index_put", "put", "scatter_add", "scatter_reduce"}
    assert not used & (racing | {"_local_scalar_dense", "nonzero", "_unique2", "item"})


def test_the_build_is_one_graph_without_a_look_at_the_data():
    def build(choice):
        built = build_routes_torch(number_experts(choice, 8), 24, 16)
        return built.slots, built.block_expert, built.padded_total

    choice = torch.rand(3, 37, 8).argsort(-1)[..., :2]
    compiled = torch.compile(build, backend="aot_eager", fullgraph=True)
    for mine, theirs in zip(compiled(choice), build(choice), strict=True):
        assert torch.equal(mine, theirs)
    torch._dynamo.reset()
