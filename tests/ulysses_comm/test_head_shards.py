"""Head shards in eager mode: packing, the recogniser, flattening, pins."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import cases, reference
from tests.bits import assert_same_bits, random_bits
from tests.cases import BF16, FP16, FP32, HEAD_DIM
from tests.spy import OperatorLog
from ulysses_comm import (
    as_send_buffer,
    empty_head_shards,
    flatten_head_shards,
    pack_head_shards,
    pin_head_layout,
)

CPU = torch.device("cpu")


def assert_tiles_one_buffer(views: list[torch.Tensor], world_size: int) -> torch.UntypedStorage:
    """Check shape, strides and offset of each view by the contract; return the storage."""
    tokens, _, _, head_dim = views[0].shape
    heads = sum(view.shape[2] for view in views)
    offset = 0
    for view in views:
        assert view.shape == (tokens, world_size, view.shape[2], head_dim)
        if tokens:  # an empty tensor's strides address nothing
            assert view.stride() == (heads * head_dim, tokens * heads * head_dim, head_dim, 1)
        assert view.storage_offset() == offset
        assert view.untyped_storage().data_ptr() == views[0].untyped_storage().data_ptr()
        offset += view.shape[2] * head_dim
    buffer = as_send_buffer(views, world_size)
    if tokens:
        assert buffer is not None
        assert buffer.shape == (world_size, tokens, heads, head_dim)
        assert buffer.is_contiguous()
        assert buffer.data_ptr() == views[0].data_ptr()
    return views[0].untyped_storage()


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("heads", cases.HEADS, ids=cases.split_name)
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_pack_stores_in_send_order(world_size: int, heads: cases.Heads, tokens: int) -> None:
    inputs = cases.inputs_of_rank(0, (tokens,) * world_size, heads)
    views = pack_head_shards(inputs, world_size)
    assert isinstance(views, list)
    expected = reference.scatter_heads_send_buffer(inputs, world_size)
    storage = assert_tiles_one_buffer(views, world_size)
    assert storage.nbytes() == expected.nbytes
    for view, tensor, want in zip(
        views, inputs, expected.permute(1, 0, 2, 3).split(heads.counts, dim=2), strict=True
    ):
        assert_same_bits(view, want, strides=True)
        assert_same_bits(view.flatten(1, 2), tensor.to(view.dtype))
    if tokens:
        buffer = as_send_buffer(views, world_size)
        assert_same_bits(buffer, expected)


def test_pack_copies_each_input_once_and_leaves_it_alone() -> None:
    inputs = cases.inputs_of_rank(0, (5, 5), cases.of_one_dtype((3, 1), BF16))
    before = [tensor.clone() for tensor in inputs]
    torch.utils.deterministic.fill_uninitialized_memory = False
    with OperatorLog() as log:
        views = pack_head_shards(inputs, 2)
    assert sum(nbytes for _, nbytes in log.moved()) == sum(tensor.nbytes for tensor in inputs)
    assert log.allocated_bytes() == [sum(tensor.nbytes for tensor in inputs)]
    views[0].zero_()
    for tensor, want in zip(inputs, before, strict=True):
        assert_same_bits(tensor, want)


def test_pack_reads_any_strides() -> None:
    wide = random_bits((HEAD_DIM, 4, 5), FP16, 1).permute(2, 1, 0)
    expanded = random_bits((5, 1, HEAD_DIM), FP16, 2).expand(-1, 2, -1)
    views = pack_head_shards([wide, expanded], 2)
    assert_tiles_one_buffer(views, 2)
    assert_same_bits(views[0].flatten(1, 2), wide)
    assert_same_bits(views[1].flatten(1, 2), expanded)


def test_pack_of_nothing_is_nothing() -> None:
    assert pack_head_shards([], 4) == []


@pytest.mark.parametrize(
    ("tensors", "world_size", "words"),
    [
        ([torch.zeros(5, 6, 8)], 4, r"tensors\[0\].*6 heads.*4"),
        ([torch.zeros(5, 8, 8), torch.zeros(4, 8, 8)], 4, r"tensors\[1\].*4 tokens.*5"),
        ([torch.zeros(5, 8)], 4, r"tensors\[0\].*\(5, 8\).*3 dim"),
        ([torch.zeros(5, 4, 2, 8)], 4, r"tensors\[0\].*\(5, 4, 2, 8\).*3 dim"),
        ([torch.zeros(5, 8, 8), torch.zeros(5, 8, 4)], 4, r"head_dim.*\[8, 4\]"),
        ([torch.zeros(5, 8, 8), torch.zeros(5, 8, 8, device="meta")], 4, "cpu.*meta|meta.*cpu"),
        ([torch.zeros(5, 8, 8)], 0, "world_size=0"),
        (torch.zeros(5, 8, 8), 4, "tensors.*list"),
    ],
)
def test_pack_refuses(tensors: object, world_size: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        pack_head_shards(tensors, world_size)  # type: ignore[arg-type]


@pytest.mark.parametrize("counts", [(3, 3, 3), (1, 3, 2), (4,)])
@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("dtype", [BF16, FP32, torch.int8], ids=str)
def test_empty_head_shards_tile_one_unwritten_buffer(
    counts: tuple[int, ...], tokens: int, dtype: torch.dtype
) -> None:
    views = empty_head_shards(tokens, 4, counts, HEAD_DIM, dtype, CPU)
    assert [view.shape[2] for view in views] == list(counts)
    assert {view.dtype for view in views} == {dtype}
    storage = assert_tiles_one_buffer(views, 4)
    assert storage.nbytes() == 4 * tokens * sum(counts) * HEAD_DIM * dtype.itemsize


def test_producers_can_write_empty_head_shards_with_out() -> None:
    views = empty_head_shards(5, 2, (2, 1), HEAD_DIM, FP32, "cpu")
    left, right = torch.randn(5, 4, HEAD_DIM), torch.randn(5, 4, HEAD_DIM)
    torch.add(left.unflatten(1, (2, 2)), right.unflatten(1, (2, 2)), out=views[0])
    torch.mul(left[:, :2].unflatten(1, (2, 1)), 2.0, out=views[1])
    buffer = as_send_buffer(views, 2)
    assert buffer is not None
    expected = reference.scatter_heads_send_buffer([left + right, left[:, :2] * 2.0], 2)
    assert_same_bits(buffer, expected)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((-1, 4, (1,), 8), "local_tokens=-1"),
        ((5, 0, (1,), 8), "world_size=0"),
        ((5, 4, (1, 0), 8), r"head_counts=\[1, 0\]"),
        ((5, 4, (1,), 0), "head_dim=0"),
    ],
)
def test_empty_head_shards_refuse(
    arguments: tuple[int, int, tuple[int, ...], int], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        empty_head_shards(*arguments, FP32, CPU)


def test_recogniser_has_no_side_effect_and_copies_nothing() -> None:
    views = pack_head_shards(cases.inputs_of_rank(0, (3, 3), cases.of_one_dtype((2, 1), BF16)), 2)
    flat = views[0].flatten(1, 2)
    before = [view.clone() for view in views]
    versions = [view._version for view in views]
    with OperatorLog() as log:
        buffer = as_send_buffer(tuple(views), 2)
        assert as_send_buffer(views, 4) is None
        assert as_send_buffer(views, 1) is None
        assert as_send_buffer(views[::-1], 2) is None
        assert as_send_buffer([], 2) is None
        assert as_send_buffer([flat], 2) is None
    assert buffer is not None
    assert log.moved() == []
    assert log.allocated_bytes() == []
    assert [view._version for view in views] == versions
    for view, want in zip(views, before, strict=True):
        assert_same_bits(view, want)


def test_recogniser_refuses_head_dims_that_only_add_up() -> None:
    """Side by side and complete, but 2 + 1 + 3 channels are no three heads of 2."""
    storage = torch.arange(6.0)
    views = [
        storage.as_strided((1, 1, 1, head_dim), (6, 6, head_dim, 1), offset)
        for head_dim, offset in ((2, 0), (1, 2), (3, 3))
    ]
    assert as_send_buffer(views, 1) is None


def test_recogniser_sees_tracked_views_only_under_grad_mode() -> None:
    views = pack_head_shards([torch.zeros(3, 4, 8)], 2)
    views[0].requires_grad_()
    assert as_send_buffer(views, 2) is None
    with torch.no_grad():
        buffer = as_send_buffer(views, 2)
        assert buffer is not None
        assert buffer.data_ptr() == views[0].data_ptr()


@st.composite
def strided_views(draw: st.DrawFn) -> tuple[list[torch.Tensor], int]:
    """Views of one storage that holds its own indices; a slip in any number of a pack's layout."""
    world_size, tokens, head_dim = draw(st.tuples(*[st.integers(1, 3)] * 3))
    counts = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    heads = sum(counts)
    total = world_size * tokens * heads * head_dim
    storage = torch.arange(total + draw(st.sampled_from([0, 0, 0, 1, head_dim])))
    strides = [heads * head_dim, tokens * heads * head_dim, head_dim, 1]
    views, offset = [], 0
    slips = draw(st.integers(0, 2))
    for count in counts:
        shape, stride, start = [tokens, world_size, count, head_dim], list(strides), offset
        if slips and draw(st.booleans()):
            slips -= 1
            what = draw(st.sampled_from(["stride", "start", "shape"]))
            if what == "stride":
                axis = draw(st.integers(0, 3))
                stride[axis] = draw(st.sampled_from([0, 1, *strides, strides[axis] + 1]))
            elif what == "start":
                start = draw(st.integers(0, total))
            else:
                axis = draw(st.integers(0, 3))
                shape[axis] = draw(st.integers(1, 4))
        last = start + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        if last < storage.numel():
            views.append(storage.as_strided(shape, stride, start))
        offset += count * head_dim
    if len(views) > 1 and draw(st.integers(0, 4)) == 0:
        views.reverse()
    return views, draw(st.sampled_from([world_size, world_size, world_size + 1]))


@settings(max_examples=600)
@given(strided_views())
def test_recogniser_says_yes_exactly_when_every_element_is_in_place(
    drawn: tuple[list[torch.Tensor], int],
) -> None:
    views, world_size = drawn
    buffer = as_send_buffer(views, world_size)
    fits = (
        len(views) > 0
        and all(view.shape[1] == world_size for view in views)
        and len({(view.shape[0], view.shape[3]) for view in views}) == 1
    )
    if fits:
        # The storage holds its own indices, so a pack reads 0, 1, 2, … in send order, to the end.
        order = torch.cat([view.permute(1, 0, 2, 3) for view in views], dim=2).flatten()
        complete = views[0].untyped_storage().nbytes() == order.nbytes
        fits = complete and torch.equal(order, torch.arange(order.numel()))
    assert (buffer is not None) == fits
    if buffer is not None:
        assert torch.equal(buffer.flatten(), torch.arange(buffer.numel()))


@pytest.mark.parametrize(("world_size", "heads"), [(2, 3), (4, 1), (1, 3), (1, 1), (8, 6)])
@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("dtype", [BF16, FP32, torch.float8_e5m2, torch.bool], ids=str)
def test_flatten_joins_ranks_and_heads(
    world_size: int, heads: int, tokens: int, dtype: torch.dtype
) -> None:
    buffer = random_bits((world_size, tokens, heads, HEAD_DIM), dtype, 3)
    view = buffer.permute(1, 0, 2, 3)
    flat = flatten_head_shards(view)
    expected = torch.cat([buffer[rank] for rank in range(world_size)], dim=1)
    assert_same_bits(flat, expected)
    if heads > 1:
        assert flat.is_contiguous()


@pytest.mark.parametrize("shape", [(5, 1, 3, HEAD_DIM), (5, 4, 1, HEAD_DIM), (5, 4, 3, HEAD_DIM)])
def test_flatten_is_a_view_where_strides_allow_one(shape: tuple[int, ...]) -> None:
    dense = random_bits(shape, BF16, 0)
    with OperatorLog() as log:
        flat = flatten_head_shards(dense)
    assert flat.data_ptr() == dense.data_ptr()
    assert log.moved() == []
    one_head = random_bits((4, 5, 1, HEAD_DIM), BF16, 0).permute(1, 0, 2, 3)
    assert flatten_head_shards(one_head).data_ptr() == one_head.data_ptr()


def test_flatten_copies_once_otherwise() -> None:
    view = random_bits((4, 5, 3, HEAD_DIM), BF16, 0).permute(1, 0, 2, 3)
    with OperatorLog() as log:
        flat = flatten_head_shards(view)
    assert sum(nbytes for _, nbytes in log.moved()) == flat.nbytes


def test_flatten_inverts_the_split_into_shards() -> None:
    inputs = cases.inputs_of_rank(0, (5,) * 4, cases.of_one_dtype((3, 1), FP32))
    for view, tensor in zip(pack_head_shards(inputs, 4), inputs, strict=True):
        assert_same_bits(flatten_head_shards(view), tensor)


def test_flatten_refuses_other_ranks() -> None:
    with pytest.raises(ValueError, match=r"\(5, 8, 16\).*4 dim"):
        flatten_head_shards(torch.zeros(5, 8, 16))


@pytest.mark.parametrize("shape", [(5, 12, 8), (5, 4, 3, 8), (0, 12, 8), (1, 2, 6, 8)])
@pytest.mark.parametrize("shard_count", [None, 4, 3])
def test_pin_is_a_tautology_in_eager_mode(shape: tuple[int, ...], shard_count: int | None) -> None:
    """A 4-D tensor passes the pin of the 3-D layout, and one of another shard count passes too."""
    tensor = random_bits(shape, BF16, 0)
    before = tensor.clone()
    with OperatorLog() as log:
        assert pin_head_layout(tensor, 12, 8, shard_count) is None
    assert log.calls == []
    assert_same_bits(tensor, before)


@pytest.mark.parametrize(
    ("shape", "arguments"),
    [
        ((5, 12, 8), (11, 8)),
        ((5, 12, 8), (12, 4)),
        ((5, 4, 3, 8), (11, 8)),
        ((5, 4, 3, 8), (12, 4, 4)),
        ((5, 8), (12, 8)),
        ((5, 12, 8), (12, 8, 5)),
    ],
)
def test_pin_that_contradicts_the_tensor_is_an_error(
    shape: tuple[int, ...], arguments: tuple[int, ...]
) -> None:
    with pytest.raises((ValueError, RuntimeError), match="expected"):
        pin_head_layout(torch.zeros(shape), *arguments)


def test_gates_broadcast_only_after_the_flatten() -> None:
    """Per-head gates `[T, H, 1]` fit `[T, H, D]`, not head shards `[T, W, H/W, D]`."""
    shards = torch.randn(4, 5, 3, 8).permute(1, 0, 2, 3)
    gates = torch.rand(5, 12, 1)
    pin_head_layout(shards, 12, 8)
    with pytest.raises(RuntimeError, match="must match"):
        shards * gates
    flat = flatten_head_shards(shards)
    pin_head_layout(flat, 12, 8)
    assert_same_bits(flat * gates, (shards * gates.unflatten(1, (4, 3))).flatten(1, 2))
