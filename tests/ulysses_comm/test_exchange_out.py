"""Buffers that the caller hands in: what is refused, and what autograd is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.spy import SpyGroup
from ulysses_comm import (
    Workspace,
    scatter_heads_gather_seqlen,
    scatter_seqlen_gather_head_shards,
    scatter_seqlen_gather_heads,
    scatter_seqlen_gather_heads_each,
    simulate,
)

SPLITS = [3, 2]
WHOLE = torch.arange(5 * 4 * 8.0).view(5, 4, 8)


def own(rank: int) -> torch.Tensor:
    shard: torch.Tensor = WHOLE.split(SPLITS)[rank]
    return shard.clone()


def two_overlapping() -> list[torch.Tensor]:
    """Two results for rank 0, of which the second begins in the last head of the first."""
    memory = torch.empty(2 * 3 * 4 * 8)
    return [memory[: 3 * 4 * 8].view(3, 4, 8), memory[3 * 4 * 8 - 8 : -8].view(3, 4, 8)]


@pytest.mark.parametrize("out", ["results", True, 0, [1], (1, 2)])
def test_what_is_no_tensor_is_refused(out: Any) -> None:
    group = SpyGroup(0, 2)
    for call in (
        lambda: scatter_heads_gather_seqlen([own(0)], SPLITS, group, out=out),
        lambda: scatter_seqlen_gather_heads(WHOLE, SPLITS, group, out=out),
        lambda: scatter_seqlen_gather_head_shards(WHOLE, SPLITS, group, out=out),
    ):
        with pytest.raises(ValueError, match=r"out .*expected a torch\.Tensor"):
            call()
    with pytest.raises(ValueError, match=r"out .*expected a (list of tensors|torch\.Tensor)"):
        scatter_seqlen_gather_heads_each([WHOLE], SPLITS, group, out=out)
    assert group.sent == []


@pytest.mark.parametrize("workspace", [True, "kept", Workspace, 0, {}])
def test_what_is_no_workspace_is_refused(workspace: Any) -> None:
    """It was found out when the other ranks were already sending."""
    group = SpyGroup(0, 2)
    with pytest.raises(ValueError, match=r"workspace .*expected a ulysses_comm\.Workspace"):
        scatter_heads_gather_seqlen([own(0)], SPLITS, group, workspace=workspace)
    with pytest.raises(ValueError, match=r"workspace .*expected a ulysses_comm\.Workspace"):
        scatter_seqlen_gather_heads(WHOLE, SPLITS, group, workspace=workspace)
    assert group.sent == []


def test_results_that_overlap_are_refused() -> None:
    """Whichever was written last would stand in both, without an error."""
    group = SpyGroup(0, 2)
    same = torch.empty(3, 4, 8)
    output = [WHOLE[:, :2].contiguous() for _ in range(2)]
    for out in ([same, same], two_overlapping()):
        with pytest.raises(ValueError, match=r"out\[1\] lies in the memory of another result"):
            scatter_seqlen_gather_heads_each(output, SPLITS, group, out=out)
    assert group.sent == []


def test_results_may_lie_side_by_side_in_one_storage() -> None:
    def step(group: Any) -> bool:
        tokens = SPLITS[group.rank()]
        out = list(torch.empty(2, tokens, 4, 8).unbind(0))
        heads = slice(2 * group.rank(), 2 * group.rank() + 2)
        output = [WHOLE[:, heads].contiguous(), -WHOLE[:, heads]]
        results = scatter_seqlen_gather_heads_each(output, SPLITS, group, out=out)
        assert [r.data_ptr() for r in results] == [o.data_ptr() for o in out]
        return all(
            torch.equal(result, sign * own(group.rank()))
            for result, sign in zip(out, (1, -1), strict=True)
        )

    assert simulate(2, step).results == [True, True]


def test_lazily_negated_buffers_are_refused() -> None:
    """A collective writes what lies there; read through the view it would be its opposite."""
    group = SpyGroup(0, 2)
    negated = torch._neg_view(torch.empty(5, 2, 8))
    with pytest.raises(ValueError, match="conjugated or negated when it is read"):
        scatter_heads_gather_seqlen([own(0)], SPLITS, group, out=negated)
    conjugated = torch.empty(2, 3, 2, 8, dtype=torch.complex64).conj()
    output = torch.empty(5, 2, 8, dtype=torch.complex64)
    with pytest.raises(ValueError, match="conjugated or negated when it is read"):
        scatter_seqlen_gather_head_shards(output, SPLITS, group, out=conjugated)
    assert group.sent == []


def test_a_buffer_of_bytes_has_to_be_aligned() -> None:
    """The results, views of other dtypes, could not be made: after the exchange."""
    tensors = [own(0), own(0).bfloat16()]
    row = 2 * 8 * 4 + 2 * 8 * 2
    group = SpyGroup(0, 2)
    with pytest.raises(ValueError, match="byte 2 of its storage: expected a multiple of 4"):
        scatter_heads_gather_seqlen(
            tensors,
            SPLITS,
            group,
            keep_dtypes=True,
            out=torch.empty(5 * row + 2, dtype=torch.uint8)[2:].view(5, row),
        )
    assert group.sent == []


def overwrite_what_autograd_saved(group: dist.ProcessGroup) -> list[str]:
    rank, errors = group.rank(), []
    for exchange, shape in (
        (lambda out: scatter_heads_gather_seqlen([own(rank)], SPLITS, group, out=out), (5, 2, 8)),
        (
            lambda out: scatter_seqlen_gather_head_shards(
                WHOLE[:, :2].contiguous(), SPLITS, group, out=out
            ),
            (2, SPLITS[rank], 2, 8),
        ),
    ):
        saved, weight = torch.ones(shape), torch.ones(shape, requires_grad=True)
        loss = (saved * weight).sum()
        exchange(saved)
        try:
            loss.backward()
        except RuntimeError as error:
            errors.append(str(error))
    return errors


@pytest.mark.gloo
def test_autograd_notices_that_a_saved_buffer_was_overwritten() -> None:
    """Gradients of the new content were computed, without an error."""
    for errors in run_ranks(overwrite_what_autograd_saved, 2):
        assert len(errors) == 2
        assert all("modified by an inplace operation" in error for error in errors)
