"""Exchanges under way: waited for twice, late, in another mode, or not at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from ulysses_comm import (
    AsyncMisuseError,
    Workspace,
    simulate,
    start_scatter_heads_gather_seqlen,
    start_scatter_seqlen_gather_head_shards,
    start_scatter_seqlen_gather_heads,
)

SPLITS = [3, 2]
WHOLE = torch.arange(5 * 4 * 8.0).view(5, 4, 8)


def own(rank: int) -> torch.Tensor:
    shard: torch.Tensor = WHOLE.split(SPLITS)[rank]
    return shard.clone()


def own_heads(rank: int) -> torch.Tensor:
    return WHOLE[:, 2 * rank : 2 * rank + 2].contiguous()


def test_the_started_forms_return_what_the_plain_ones_do() -> None:
    def step(group: Any) -> None:
        rank = group.rank()
        first = start_scatter_heads_gather_seqlen([own(rank)], SPLITS, group)
        second = start_scatter_seqlen_gather_heads(own_heads(rank), SPLITS, group)
        third = start_scatter_seqlen_gather_head_shards(own_heads(rank), SPLITS, group)
        shards, flat, heads = third.wait(), second.wait(), first.wait()
        assert torch.equal(heads[0], own_heads(rank))
        assert torch.equal(flat, own(rank))
        assert torch.equal(shards.flatten(1, 2), own(rank))
        assert first.wait() is heads, "the same result when called again"

    simulate(2, step)


def test_a_handle_that_nobody_waits_for_is_reported() -> None:
    # The report names the caller's line, not the one in the package that calls the collective.
    with pytest.raises(
        AsyncMisuseError, match=r"never waited for[^$]*issued at \S*test_pending\.py"
    ):
        simulate(
            2, lambda g: start_scatter_heads_gather_seqlen([own(g.rank())], SPLITS, g) and None
        )


@pytest.mark.parametrize("wait_in", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_gradients_follow_the_mode_of_the_start(wait_in: Any) -> None:
    """A handle waited for in inference mode gave inference tensors, which autograd cannot save."""

    def step(group: Any) -> None:
        local = own(group.rank()).requires_grad_()
        handle = start_scatter_heads_gather_seqlen([local], SPLITS, group)
        back = start_scatter_seqlen_gather_heads(
            own_heads(group.rank()).requires_grad_(), SPLITS, group
        )
        with wait_in():
            (gathered,) = handle.wait()
            result = back.wait()
        assert gathered.requires_grad
        assert result.requires_grad
        assert not gathered.is_inference()
        assert not result.is_inference()
        (gathered * gathered).sum().backward()
        assert local.grad is not None
        assert torch.equal(local.grad, 2 * local)
        result.sum().backward()

    simulate(2, step)


def test_what_starts_without_gradients_ends_without() -> None:
    def step(group: Any) -> bool:
        local = own(group.rank()).requires_grad_()
        with torch.no_grad():
            handle = start_scatter_heads_gather_seqlen([local], SPLITS, group)
        return handle.wait()[0].requires_grad

    assert simulate(2, step).results == [False, False]


def drop_handles(group: dist.ProcessGroup) -> bool:
    """Start exchanges that nobody waits for between ones that are read."""
    rank, workspace, good = group.rank(), Workspace(), True
    for turn in range(5):
        start_scatter_heads_gather_seqlen([own(rank) - turn], SPLITS, group, workspace=workspace)
        handle = start_scatter_heads_gather_seqlen(
            [own(rank) + turn], SPLITS, group, workspace=workspace
        )
        good = good and torch.equal(handle.wait()[0], own_heads(rank) + turn)
    return good


@pytest.mark.gloo
def test_a_dropped_handle_keeps_its_buffers_until_gloo_is_done() -> None:
    assert run_ranks(drop_handles, 2) == [True, True]
