"""Sharding a sequence, gathering it, and what gradients mean on the way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.bits import assert_same_bits, random_bits
from tests.ranks import run_ranks
from tests.traffic import calls_of
from ulysses_comm import (
    LONE_RANK,
    SequenceDispatcher,
    balanced_split_sizes,
    gather_sequence,
    shard_sequence,
    simulate,
    sum_gradients,
    sum_losses,
)

SPLITS = [(7,), (3, 4), (0, 7), (2, 0, 5), (1, 2, 4, 0), (0, 0, 0, 7)]


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.bool])
def test_round_trip_is_bitwise_identity(
    splits: tuple[int, ...], dim: int, dtype: torch.dtype
) -> None:
    shape = [2, 3, 2]
    shape[dim] = 7
    whole = random_bits(tuple(shape), dtype, seed=1)

    def step(group: dist.ProcessGroup) -> torch.Tensor:
        own = shard_sequence(whole, group, splits, dim=dim)
        assert_same_bits(own, whole.split(splits, dim=dim)[group.rank()])
        assert (
            own.data_ptr() == whole.split(splits, dim=dim)[group.rank()].data_ptr()
            or not own.numel()
        )
        return gather_sequence(own, group, splits, dim=dim)

    simulation = simulate(len(splits), step)
    for gathered in simulation.results:
        assert_same_bits(gathered, whole)
    assert len(calls_of(simulation)) == (1 if len(splits) > 1 else 0)


@pytest.mark.parametrize("length", [0, 1, 10, 56700])
def test_the_union_of_balanced_shards_is_the_input(length: int) -> None:
    """VeOmni #61, #1139: floor division dropped the last tokens."""
    whole = torch.arange(length)
    results = simulate(8, lambda group: shard_sequence(whole, group, dim=0)).results
    assert_same_bits(torch.cat(results), whole)


def test_no_split_sizes_to_gather_means_as_many_on_every_rank() -> None:
    whole = torch.arange(12.0).view(1, 12)
    results = simulate(3, lambda g: gather_sequence(shard_sequence(whole, g), g)).results
    assert all(torch.equal(result, whole) for result in results)


@pytest.mark.parametrize("splits", SPLITS, ids=str)
@pytest.mark.parametrize("rule", ["same", "own"])
def test_gradients_of_a_gather_follow_the_declared_rule(splits: tuple[int, ...], rule: Any) -> None:
    """DeepSpeed #5248, VeOmni #338, verl #2857: gradients were off by the group's size."""
    whole = torch.arange(14.0, dtype=torch.float64).view(2, 7)
    weight = torch.randn(2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    world_size = len(splits)

    def step(group: dist.ProcessGroup) -> torch.Tensor | None:
        own = shard_sequence(whole, group, splits).clone().requires_grad_()
        gathered = gather_sequence(own, group, splits, loss=rule)
        scale = 1 if rule == "same" else 1 + group.rank()
        (gathered.square() * weight).sum().mul(scale).backward()
        return own.grad

    simulation = simulate(world_size, step)
    expected = 2 * whole * weight
    if rule == "own":
        expected = expected * sum(range(1, world_size + 1))
    grads = [grad for grad in simulation.results if grad is not None]
    torch.testing.assert_close(torch.cat(grads, dim=1), expected)
    if world_size > 1:
        assert len(calls_of(simulation)) == (1 if rule == "same" else 2)


def test_the_gradient_of_a_whole_tensor_is_in_the_rank_s_part() -> None:
    whole = torch.ones(2, 7)

    def step(group: dist.ProcessGroup) -> torch.Tensor | None:
        leaf = whole.clone().requires_grad_()
        shard_sequence(leaf, group, [3, 4]).mul(1 + group.rank()).sum().backward()
        return leaf.grad

    total = sum(simulate(2, step).results)
    assert torch.equal(total, torch.tensor([1.0] * 3 + [2.0] * 4).expand(2, -1))


def test_the_sum_of_losses_is_the_whole_loss_and_counts_once() -> None:
    def step(group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor | None]:
        own = torch.tensor(1.5 + group.rank(), requires_grad=True)
        total = sum_losses(own * 2, group)
        total.backward()
        with torch.no_grad():
            assert torch.equal(sum_losses(own * 2, group), total)
        return total.detach(), own.grad

    for total, grad in simulate(3, step).results:
        assert total == 15
        assert grad == 2


def test_a_lone_rank_sends_nothing() -> None:
    whole = torch.ones(1, 5, requires_grad=True)
    assert gather_sequence(whole, LONE_RANK, loss="same") is whole
    assert torch.equal(shard_sequence(whole, LONE_RANK), whole)
    assert sum_losses(whole, None) is whole


def test_a_dispatcher_holds_one_request() -> None:
    tokens, hidden = torch.arange(10).view(1, 10), torch.ones(2, 10, 3)

    def step(group: dist.ProcessGroup) -> None:
        dispatcher = SequenceDispatcher(group)
        assert not dispatcher.is_held
        own = dispatcher.dispatch(tokens)
        assert dispatcher.split_sizes == balanced_split_sizes(10, 3)
        assert dispatcher.dispatch(hidden).shape == (2, own.shape[1], 3)
        assert torch.equal(dispatcher.combine(own), tokens)
        assert dispatcher.begin(10) == [4, 3, 3]
        with pytest.raises(ValueError, match=r"\[3, 3, 3\] \(9 tokens\) while.*\[4, 3, 3\]"):
            dispatcher.dispatch(tokens[:, :9])
        with pytest.raises(ValueError, match=r"\[3, 3, 4\].*while a request of \[4, 3, 3\]"):
            dispatcher.begin([3, 3, 4])
        assert torch.equal(dispatcher.dispatch(tokens), own), "the held request is untouched"
        dispatcher.release()
        with pytest.raises(RuntimeError, match="No request is held"):
            dispatcher.split_sizes  # noqa: B018
        assert dispatcher.begin([3, 3, 4]) == [3, 3, 4]
        assert dispatcher.dispatch(tokens).shape[1] == [3, 3, 4][group.rank()]

    simulate(3, step)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t, g: shard_sequence(t, g, [3, 3]), "7 tokens on dim 1: expected 6"),
        (lambda t, g: shard_sequence(t, g, [7]), "1 entries"),
        (lambda t, g: shard_sequence(t, g, dim=2), r"dim=2 for a tensor of shape \(2, 7\)"),
        (lambda t, g: gather_sequence(t, g, [3, 4]), r"7 tokens on dim 1: expected.*=3"),
        (lambda t, g: gather_sequence(t.requires_grad_(), g), "loss=None.*'same'.*'own'"),
        (lambda t, g: SequenceDispatcher(g).begin([1, 2, 3]), "3 entries"),
    ],
)
def test_refuses(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(2, lambda group: call(torch.zeros(2, 7), group))


def gather_on_gloo(group: dist.ProcessGroup) -> list[torch.Tensor]:
    whole = torch.arange(14.0, dtype=torch.bfloat16).view(2, 7)
    results = []
    for splits in ((3, 0, 4), (7, 0, 0)):
        own = shard_sequence(whole, group, splits).clone().requires_grad_()
        gathered = gather_sequence(own, group, splits, loss="own")
        gathered.float().square().sum().backward()
        results += [gathered.detach(), own.grad]
        results.append(sum_losses(torch.tensor(1.0), group))
    return results


@pytest.mark.gloo
def test_uneven_gathers_work_on_gloo() -> None:
    """Gloo refuses an uneven all-gather; ours is none."""
    whole = torch.arange(14.0, dtype=torch.bfloat16).view(2, 7)
    by_rank = run_ranks(gather_on_gloo, 3)
    for index, splits in ((0, (3, 0, 4)), (3, (7, 0, 0))):
        for rank, results in enumerate(by_rank):
            assert_same_bits(results[index], whole)
            expected = 3 * 2 * whole.float().split(splits, dim=1)[rank]
            assert torch.equal(results[index + 1].float(), expected)
            assert results[index + 2] == 3


def test_the_sum_of_a_loss_that_is_infinite_is_infinite() -> None:
    """It was nan on the rank whose part is infinite: inf - inf."""

    def step(group: dist.ProcessGroup) -> tuple[float, float]:
        part = torch.tensor(torch.inf if group.rank() else 1.0, requires_grad=True)
        total = sum_losses(part, group)
        total.backward()
        assert part.grad is not None
        return total.item(), part.grad.item()

    assert simulate(2, step).results == [(torch.inf, 1.0)] * 2


def sum_in_different_orders(group: dist.ProcessGroup) -> torch.Tensor:
    parts = torch.arange(6.0).view(2, 3)
    return sum_losses(parts.t().contiguous().t() if group.rank() else parts, group)


@pytest.mark.gloo
def test_strides_of_a_loss_do_not_mix_up_its_elements() -> None:
    """An all-reduce adds up memory; ranks whose elements lie in another order got another sum."""
    for total in [
        *run_ranks(sum_in_different_orders, 2),
        *simulate(2, sum_in_different_orders).results,
    ]:
        assert torch.equal(total, 2 * torch.arange(6.0).view(2, 3))


def test_a_sparse_gradient_is_refused_by_name() -> None:
    def step(group: dist.ProcessGroup) -> None:
        embedding = torch.nn.Embedding(4, 3, sparse=True)
        embedding(torch.tensor([1, 2])).sum().backward()
        with pytest.raises(ValueError, match=r"parameters\[0\] of shape \(4, 3\).*sparse"):
            sum_gradients(embedding.parameters(), group)

    assert len(simulate(2, step).traffic) == 0


@pytest.mark.parametrize("length", [np.int64(5), np.int32(5)])
def test_a_dispatcher_takes_numpy_s_integers(length: Any) -> None:
    assert (
        simulate(2, lambda group: SequenceDispatcher(group).begin(length)).results == [[3, 2]] * 2
    )
