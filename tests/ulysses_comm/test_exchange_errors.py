"""Bad input: a ValueError that says what was given and expected, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.cases import HEAD_DIM
from tests.spy import SpyGroup
from ulysses_comm import (
    scatter_heads_gather_seqlen,
    scatter_seqlen_gather_head_shards,
    scatter_seqlen_gather_heads,
    simulate,
    simulate_world,
)

WORLD, RANK, SPLITS = 4, 1, [5, 4, 3, 2]


def local(*shape: int, **kwargs: Any) -> torch.Tensor:
    """A tensor of rank 1's four tokens unless a shape is given."""
    return torch.zeros(shape or (4, 8, HEAD_DIM), **kwargs)


# (what, tensors, split_sizes, every word that the message must hold)
BAD_HEAD_SCATTERS: list[tuple[str, Any, Any, list[str]]] = [
    ("2-D", [local(4, 8)], SPLITS, ["tensors[0]", "(4, 8)", "3 dim", "4"]),
    ("5-D", [local(), local(1, 4, 4, 2, 16)], SPLITS, ["tensors[1]", "(1, 4, 4, 2, 16)"]),
    ("one tensor", local(), SPLITS, ["tensors", "list"]),
    ("not a tensor", [local(), None], SPLITS, ["tensors[1]", "NoneType"]),
    ("another rank's tokens", [local(5, 8, 16)], SPLITS, ["tensors[0]", "5", "split_sizes[1]=4"]),
    ("the whole sequence", [local(14, 8, 16)], SPLITS, ["tensors[0]", "14", "split_sizes[1]=4"]),
    ("second input longer", [local(), local(6, 8, 16)], SPLITS, ["tensors[1]", "6", "4"]),
    ("4-D of other tokens", [local(3, 4, 2, 16)], SPLITS, ["tensors[0]", "3", "4"]),
    ("heads do not divide", [local(), local(4, 6, 16)], SPLITS, ["tensors[1]", "6 heads", "4"]),
    ("fewer heads than ranks", [local(4, 2, 16)], SPLITS, ["tensors[0]", "2 heads", "4"]),
    ("4-D, heads do not divide", [local(4, 3, 2, 16)], SPLITS, ["tensors[0]", "6 heads", "4"]),
    ("other head_dim", [local(), local(4, 8, 8)], SPLITS, ["head_dim", "[16, 8]"]),
    ("no channels", [local(4, 8, 0)], SPLITS, ["tensors[0]", "(4, 8, 0)"]),
    ("another device", [local(), local(device="meta")], SPLITS, ["cpu", "meta", "device"]),
    ("too few splits", [local()], [5, 4, 3], ["split_sizes", "[5, 4, 3]", "3", "4 ranks"]),
    ("too many splits", [local()], [5, 4, 3, 2, 1], ["split_sizes", "5", "4 ranks"]),
    ("a negative split", [local()], [5, 4, -3, 2], ["split_sizes", "[5, 4, -3, 2]"]),
    ("no splits", [local()], [], ["split_sizes", "[]", "4 ranks"]),
    ("fractional splits", [local()], [5, 4.0, 3, 2], ["split_sizes", "4.0"]),
    ("a number as splits", [local()], 4, ["split_sizes", "4"]),
    ("a set of splits", [local()], {5, 4, 3, 2}, ["split_sizes", "sequence"]),
    ("a mapping as splits", [local()], dict.fromkeys(SPLITS), ["split_sizes", "sequence"]),
    ("an array of rows", [local()], np.array(SPLITS)[:, None], ["split_sizes", "whole numbers"]),
    ("a float tensor", [local()], [5, torch.tensor(4.0), 3, 2], ["split_sizes", "tensor(4.)"]),
    ("a bool tensor", [local()], [5, torch.tensor(True), 3, 2], ["split_sizes", "tensor(True)"]),
    ("sparse", [local().to_sparse()], SPLITS, ["tensors[0]", "sparse"]),
    ("no list", None, SPLITS, ["tensors", "NoneType", "list"]),
]

BAD_SEQLEN_SCATTERS: list[tuple[str, Any, Any, list[str]]] = [
    ("2-D", local(14, 8), SPLITS, ["tensor", "(14, 8)", "3 dim"]),
    ("4-D", local(14, 4, 2, 16), SPLITS, ["tensor", "(14, 4, 2, 16)", "3 dim"]),
    ("not a tensor", [local()], SPLITS, ["tensor", "list"]),
    ("local tokens only", local(4, 2, 16), SPLITS, ["tensor", "4 tokens", "14"]),
    ("one token more", local(15, 2, 16), SPLITS, ["tensor", "15", "14", "split_sizes"]),
    ("too few splits", local(14, 2, 16), [5, 4, 5], ["split_sizes", "[5, 4, 5]", "4 ranks"]),
    ("too many splits", local(14, 2, 16), [5, 4, 3, 1, 1], ["split_sizes", "4 ranks"]),
    ("a negative split", local(14, 2, 16), [5, 4, 7, -2], ["split_sizes", "-2"]),
    ("transposed", local(2, 14, 16).transpose(0, 1), SPLITS, ["tensor", "strides", "contiguous"]),
    ("sliced heads", local(14, 4, 16)[:, :2], SPLITS, ["tensor", "strides", "contiguous"]),
    ("expanded", local(14, 1, 16).expand(-1, 2, -1), SPLITS, ["tensor", "contiguous"]),
    ("every second token", local(28, 2, 16)[::2], SPLITS, ["tensor", "contiguous"]),
]

OUTPUT_EXCHANGES = [scatter_seqlen_gather_head_shards, scatter_seqlen_gather_heads]


def assert_refused(call: Callable[[dist.ProcessGroup], Any], words: list[str]) -> None:
    group = SpyGroup(RANK, WORLD)
    with pytest.raises(ValueError) as caught:  # noqa: PT011  the words are checked one by one
        call(group)
    message = str(caught.value)
    assert [word for word in words if word not in message] == [], message
    assert "xpected" in message, f"the message does not say what was expected: {message}"
    assert group.sent == [], "something was sent before the error"


@pytest.mark.parametrize(
    ("tensors", "split_sizes", "words"),
    [case[1:] for case in BAD_HEAD_SCATTERS],
    ids=[case[0] for case in BAD_HEAD_SCATTERS],
)
def test_head_scatter_refuses(tensors: Any, split_sizes: Any, words: list[str]) -> None:
    assert_refused(lambda group: scatter_heads_gather_seqlen(tensors, split_sizes, group), words)


@pytest.mark.parametrize("exchange", OUTPUT_EXCHANGES, ids=lambda e: e.__name__)
@pytest.mark.parametrize(
    ("tensor", "split_sizes", "words"),
    [case[1:] for case in BAD_SEQLEN_SCATTERS],
    ids=[case[0] for case in BAD_SEQLEN_SCATTERS],
)
def test_output_exchange_refuses(
    exchange: Callable[..., Any], tensor: Any, split_sizes: Any, words: list[str]
) -> None:
    assert_refused(lambda group: exchange(tensor, split_sizes, group), words)


def test_keep_dtypes_refuses_the_same_but_other_head_dims() -> None:
    for what, tensors, split_sizes, words in BAD_HEAD_SCATTERS:
        if what == "other head_dim":
            continue
        assert_refused(
            lambda group, tensors=tensors, sizes=split_sizes: scatter_heads_gather_seqlen(
                tensors, sizes, group, keep_dtypes=True
            ),
            words,
        )


def test_dtypes_without_a_common_one_are_refused() -> None:
    tensors = [local(), local().to(torch.float8_e4m3fn)]
    assert_refused(
        lambda group: scatter_heads_gather_seqlen(tensors, SPLITS, group),
        ["float8_e4m3fn", "float32", "keep_dtypes=True"],
    )


def test_a_lone_rank_checks_too() -> None:
    group = None
    with pytest.raises(ValueError, match=r"tensors\[0\].*4 tokens.*split_sizes\[0\]=5"):
        scatter_heads_gather_seqlen([local()], [5], group)
    with pytest.raises(ValueError, match=r"split_sizes.*2 entries"):
        scatter_heads_gather_seqlen([local()], [2, 2], group)
    for exchange in OUTPUT_EXCHANGES:
        with pytest.raises(ValueError, match=r"4 tokens.*5"):
            exchange(local(), [5], group)
        with pytest.raises(ValueError, match="contiguous"):
            exchange(local(8, 4, 16).transpose(0, 1), [4], group)


def test_splits_may_be_any_sequence_of_whole_numbers() -> None:
    """numpy integers, tuples, a tensor's sizes: whatever counts as an index."""
    import numpy as np

    for split_sizes in (tuple(SPLITS), np.array(SPLITS), torch.Size(SPLITS), range(5, 1, -1)):
        group = SpyGroup(RANK, WORLD)
        scatter_heads_gather_seqlen([local()], split_sizes, group)
        (sent,) = group.sent
        assert sent.output_split_sizes == SPLITS
        assert all(type(size) is int for size in sent.output_split_sizes)


def test_the_rank_at_fault_says_so_and_ends_the_run() -> None:
    def step(group: dist.ProcessGroup) -> list[torch.Tensor]:
        tokens = SPLITS[group.rank()] + (group.rank() == 2)
        return scatter_heads_gather_seqlen([torch.zeros(tokens, 4, HEAD_DIM)], SPLITS, group)

    with pytest.raises(ValueError, match=r"4 tokens: expected split_sizes\[2\]=3.*rank 2"):
        simulate(WORLD, step)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_refused() -> None:
    """A nested tensor has no shape to look at."""
    nested = torch.nested.nested_tensor([local(4, 16), local(2, 16)])
    assert_refused(
        lambda group: scatter_heads_gather_seqlen([nested], SPLITS, group), ["tensors[0]", "nested"]
    )


def test_distributed_tensors_are_refused() -> None:
    """They have no memory of their own: torch failed in the pack, or where the data is sent."""

    def program() -> None:
        mesh = init_device_mesh("cpu", (2,))
        for call, shape in (
            (lambda t: scatter_heads_gather_seqlen([t], [4, 4], mesh), (4, 8, 16)),
            (lambda t: scatter_seqlen_gather_heads(t, [4, 4], mesh), (8, 4, 16)),
            (lambda t: scatter_seqlen_gather_head_shards(t, [4, 4], mesh), (8, 4, 16)),
        ):
            with pytest.raises(ValueError, match=r"is a DTensor: expected .* to_local\(\)"):
                call(DTensor.from_local(local(*shape), mesh))

    assert len(simulate_world(2, program).traffic.select("all_to_all_single")) == 0
