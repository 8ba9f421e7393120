"""The plan of heads: every head once, key/value heads where they are read, in every turn."""

from __future__ import annotations

import itertools

import pytest
import torch

from ulysses_comm import split_query_groups
from ulysses_comm.head_plan import Selection, plan_heads, select_heads
from ulysses_comm.head_split import HeadSplit

HEADS = [(h, h // g) for h in (1, 2, 6, 8, 12, 28, 40) for g in (1, 2, 4, 5, 8) if h % g == 0]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("chunks", [1, 2, 3, 7])
def test_every_query_head_meets_its_key_value_head_once(world_size: int, chunks: int) -> None:
    """vllm-omni #5716: padding query and KV heads apart broke their ratio."""
    for num_heads, num_kv_heads in HEADS:
        plan = plan_heads(num_heads, num_kv_heads, world_size, chunks)
        query, key_value = split_query_groups(num_heads, num_kv_heads, world_size)
        assert (plan.query, plan.key_value) == (query, key_value)
        assert 1 <= len(plan.turns) <= min(chunks, max(query.counts))
        first = plan.turns[0].key_value
        assert first is not None
        seen = []
        for turn in plan.turns:
            sent = turn.key_value or first
            for rank, local in enumerate(turn.local):
                seen += range(*local.query)
                q_start, q_stop = turn.query.split.ranges[rank]
                assert list(turn.query.heads[q_start:q_stop]) == list(range(*local.query))
                kv_start, kv_stop = sent.split.ranges[rank]
                held = list(sent.heads[kv_start:kv_stop])
                count = local.key_value[1] - local.key_value[0]
                read = held[local.key_value_offset : local.key_value_offset + count]
                if not local.num_query:
                    continue
                assert read == list(range(*local.key_value))
                repeat = local.num_query // count
                index = local.index or [i // repeat for i in range(local.num_query)]
                group = num_heads // num_kv_heads
                assert [read[i] for i in index] == [h // group for h in range(*local.query)]
        assert sorted(seen) == list(range(num_heads))


@pytest.mark.parametrize(
    ("heads", "world_size"), [((8, 8), 2), ((7, 7), 4), ((8, 2), 4), ((6, 2), 3)]
)
def test_selected_heads_are_the_ones_that_the_plan_names(
    heads: tuple[int, int], world_size: int
) -> None:
    plan = plan_heads(*heads, world_size, 2)
    tensor = torch.arange(heads[0]).view(1, -1, 1).expand(3, -1, 2)
    cuts = select_heads(tensor, [turn.query for turn in plan.turns], plan.query)
    for cut, turn in zip(cuts, plan.turns, strict=True):
        flat = cut.flatten(1, 2) if cut.dim() == 4 else cut
        assert flat[0, :, 0].tolist() == list(turn.query.heads)
    if plan.is_even:
        storage = tensor.untyped_storage().data_ptr()
        assert all(cut.untyped_storage().data_ptr() == storage for cut in cuts), "no copies"


def test_a_selection_numbers_heads_among_themselves() -> None:
    selection = Selection.of_ranges([(1, 3), (3, 3), (2, 5)])
    assert selection.heads == (1, 2, 3, 4)
    assert selection.split == HeadSplit(4, ((0, 2), (0, 0), (1, 4)))


def test_key_value_heads_travel_with_the_first_turn_where_they_cannot_be_cut() -> None:
    plan = plan_heads(8, 1, 2, 4)
    assert [turn.key_value is None for turn in plan.turns] == [False, True, True, True]
    plan = plan_heads(8, 8, 2, 4)
    assert all(turn.key_value is not None for turn in plan.turns)


def test_the_plan_is_the_same_object_for_the_same_heads() -> None:
    assert plan_heads(8, 2, 4, 1) is plan_heads(8, 2, 4, 1)
    for world_size, chunks in itertools.product((1, 3), (1, 2)):
        with pytest.raises(ValueError, match="num_kv_heads=3"):
            plan_heads(8, 3, world_size, chunks)
