"""A call that was checked is known again, and nothing that the check would refuse passes for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from tests.spy import SpyGroup
from ulysses_comm import (
    HeadSplit,
    Workspace,
    checks,
    scatter_heads_gather_seqlen,
    scatter_seqlen_gather_head_shards,
    scatter_seqlen_gather_heads,
)
from ulysses_comm.known import KnownCalls, key_of_call

SPLITS = [3, 2]
Inputs = list[torch.Tensor]


def qkv(tokens: int = 3, heads: int = 4, head_dim: int = 8) -> Inputs:
    return [torch.randn(tokens, heads, head_dim) for _ in range(3)]


@pytest.fixture
def group() -> SpyGroup:
    return SpyGroup(0, 2)


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_KNOWN", KnownCalls())


@pytest.fixture
def forbid_checks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def forbid() -> None:
        def fail(*_: object) -> None:
            raise AssertionError("checked again")

        monkeypatch.setattr(checks, "check_split_sizes", fail)

    return forbid


def test_a_call_is_checked_once(group: SpyGroup, forbid_checks: Callable[[], None]) -> None:
    def calls() -> None:
        output = torch.randn(5, 2, 8)
        views = scatter_heads_gather_seqlen(qkv(), SPLITS, group, workspace=Workspace())
        assert [view.shape for view in views] == [(5, 2, 8)] * 3
        scatter_heads_gather_seqlen(tuple(t.requires_grad_() for t in qkv()), tuple(SPLITS), group)
        flat = scatter_seqlen_gather_heads(output, SPLITS, group)
        shards = scatter_seqlen_gather_head_shards(output, SPLITS, group)
        assert (flat.shape, shards.shape) == ((3, 4, 8), (3, 2, 2, 8))

    calls()
    forbid_checks()
    calls()


def test_new_lengths_heads_and_splits_are_checked_anew(group: SpyGroup) -> None:
    uneven = [HeadSplit.of_counts([3, 1])] * 3
    for _ in range(2):
        assert scatter_heads_gather_seqlen(qkv(), SPLITS, group)[0].shape == (5, 2, 8)
        assert scatter_heads_gather_seqlen(qkv(), [3, 7], group)[0].shape == (10, 2, 8)
        assert scatter_heads_gather_seqlen(qkv(heads=6), SPLITS, group)[0].shape == (5, 3, 8)
        results = scatter_heads_gather_seqlen(qkv(), SPLITS, group, head_splits=uneven)
        assert results[0].shape == (5, 3, 8)
        mixed = [qkv()[0], qkv()[0].bfloat16()]
        kept = scatter_heads_gather_seqlen(mixed, SPLITS, group, keep_dtypes=True)
        assert [result.dtype for result in kept] == [torch.float32, torch.bfloat16]
        promoted = scatter_heads_gather_seqlen(mixed, SPLITS, group)
        assert [result.dtype for result in promoted] == [torch.float32] * 2


@pytest.mark.parametrize(
    "splits", [[3.0, 2], [True, 2], ["3", 2], [3, -2], [3], "32", {3: 0, 2: 0}], ids=str
)
def test_what_equals_known_split_sizes_is_still_refused(group: SpyGroup, splits: Any) -> None:
    scatter_heads_gather_seqlen(qkv(), SPLITS, group)
    scatter_heads_gather_seqlen(qkv(tokens=1), [1, 2], group)
    sent = len(group.sent)
    with pytest.raises(ValueError, match="split_sizes"):
        scatter_heads_gather_seqlen(qkv(tokens=1 if splits == [True, 2] else 3), splits, group)
    assert len(group.sent) == sent


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: [*qkv()[:2], qkv(tokens=2)[0]],
        lambda: [*qkv()[:2], qkv(heads=3)[0]],
        lambda: [*qkv()[:2], qkv(head_dim=9)[0]],
        lambda: [*qkv()[:2], qkv()[0].to("meta")],
        lambda: [*qkv()[:2], qkv()[0].to_sparse()],
        lambda: [*qkv()[:2], torch.nested.nested_tensor([torch.ones(4, 8)] * 3)],
        lambda: [*qkv()[:2], "v"],
        lambda: torch.stack(qkv()),
    ],
    ids=["tokens", "heads", "head_dim", "device", "sparse", "nested", "string", "one tensor"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_known_call_lets_no_other_through(group: SpyGroup, wrong: Callable[[], Any]) -> None:
    scatter_heads_gather_seqlen(qkv(), SPLITS, group)
    with pytest.raises(ValueError, match="tensors"):
        scatter_heads_gather_seqlen(wrong(), SPLITS, group)
    assert len(group.sent) == 1


def test_strides_are_part_of_a_call(group: SpyGroup) -> None:
    output = torch.randn(5, 2, 8)
    scatter_seqlen_gather_heads(output, SPLITS, group)
    with pytest.raises(ValueError, match="contiguous"):
        scatter_seqlen_gather_heads(
            output.transpose(0, 1).contiguous().transpose(0, 1), SPLITS, group
        )


def test_ranks_and_groups_are_part_of_a_call(group: SpyGroup) -> None:
    scatter_heads_gather_seqlen(qkv(), SPLITS, group)
    with pytest.raises(ValueError, match="tokens of rank 1"):
        scatter_heads_gather_seqlen(qkv(), SPLITS, SpyGroup(1, 2))
    with pytest.raises(ValueError, match="3 ranks"):
        scatter_heads_gather_seqlen(qkv(), SPLITS, SpyGroup(0, 3))


def test_head_shards_that_have_to_be_flattened_are_not_known(group: SpyGroup) -> None:
    """Their copy has to be made, and booked, in every call."""
    shards = [tensor.unflatten(1, (4, 1)) for tensor in qkv()]
    for _ in range(2):
        results = scatter_heads_gather_seqlen(shards, SPLITS, group)
        assert [result.shape for result in results] == [(5, 2, 8)] * 3


@pytest.mark.parametrize(
    "splits",
    [numpy.array([3, 2]), torch.tensor([3, 2]), [numpy.int64(3), 2], range(2)],
    ids=["numpy", "torch", "numpy integer", "range"],
)
def test_what_is_not_plain_has_no_key(splits: Any) -> None:
    assert key_of_call(qkv(), splits, None) is None
    assert key_of_call(qkv(), SPLITS, None) is not None


def test_no_more_than_so_many_calls_are_known() -> None:
    known: KnownCalls[int] = KnownCalls()
    for number in range(2000):
        known.remember(("call", number), number)
        assert known.get(("call", number)) == number
        assert len(known._outcomes) <= 512
    assert known.get(None) is None
