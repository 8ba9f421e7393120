"""Which buffers, copies and collectives a backward takes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests import cases, reference
from tests.bits import assert_same_bits
from tests.cases import BF16, FP32, HEAD_DIM
from tests.traffic import calls_of
from ulysses_comm import (
    HeadSplit,
    Workspace,
    pack_head_shards,
    scatter_heads_gather_seqlen,
    scatter_seqlen_gather_head_shards,
    scatter_seqlen_gather_heads,
    simulate,
    transfer,
)

COUNTS = (2, 3, 2)  # one head a rank would flatten without a copy
WORLDS = [(2, (4, 4)), (2, (0, 5)), (4, (5, 4, 3, 6)), (3, (0, 7, 2))]
every_world = pytest.mark.parametrize(("world_size", "splits"), WORLDS, ids=cases.split_name)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every exchange count as a large one."""
    monkeypatch.setattr(transfer, "APART_BYTES", 0)


def values(*shape: int, seed: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def leaves_of(
    rank: int, splits: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = (FP32,) * 3
) -> list[torch.Tensor]:
    return [
        values(splits[rank], len(splits) * n, HEAD_DIM, seed=10 * rank + i, dtype=dtype)
        .requires_grad_()
        for i, (n, dtype) in enumerate(zip(COUNTS, dtypes, strict=True))
    ]  # fmt: skip


def upstream_of(
    rank: int, splits: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = (FP32,) * 3, step: int = 0
) -> list[torch.Tensor]:
    return [
        values(sum(splits), n, HEAD_DIM, seed=900 + 100 * step + 10 * rank + i, dtype=dtype)
        for i, (n, dtype) in enumerate(zip(COUNTS, dtypes, strict=True))
    ]


def expected_gradients(
    rank: int, splits: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = (FP32,) * 3, step: int = 0
) -> list[torch.Tensor]:
    upstream = [upstream_of(r, splits, dtypes, step) for r in range(len(splits))]
    return [
        reference.scatter_seqlen_heads([grads[index] for grads in upstream], splits, rank)
        for index in range(len(COUNTS))
    ]


@every_world
@pytest.mark.parametrize("dtypes", [(FP32,) * 3, (BF16, FP32, BF16)], ids=str)
def test_large_gradients_go_back_as_they_lie_and_are_copied_once(
    large: None, world_size: int, splits: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> None:
    addresses: dict[int, list[int]] = {}

    def step(group: dist.ProcessGroup) -> list[torch.Tensor]:
        rank = group.rank()
        leaves, upstream = leaves_of(rank, splits, dtypes), upstream_of(rank, splits, dtypes)
        results = scatter_heads_gather_seqlen(leaves, splits, group, keep_dtypes=True)
        addresses[rank] = [grad.data_ptr() for grad in upstream]
        return list(torch.autograd.grad(results, leaves, upstream))

    simulation = simulate(world_size, step)
    _, *back = calls_of(simulation)
    assert len(back) == 3, "one collective for each gradient"
    for rank, gradients in enumerate(simulation.results):
        for gradient, expected in zip(
            gradients, expected_gradients(rank, splits, dtypes), strict=True
        ):
            assert_same_bits(gradient, expected, f"rank {rank}")
        assert [call.send_addresses[rank] for call in back] == addresses[rank]
        received = sum(gradient.nbytes for gradient in gradients)
        assert sum(call.copied_bytes[rank] for call in back) == received, "one copy of what came"


@every_world
def test_large_gradients_of_head_shards_are_not_copied_at_all(
    large: None, world_size: int, splits: tuple[int, ...]
) -> None:
    def step(group: dist.ProcessGroup) -> list[torch.Tensor]:
        packed = pack_head_shards(leaves_of(group.rank(), splits), world_size)
        results = scatter_heads_gather_seqlen(packed, splits, group)
        return list(torch.autograd.grad(results, packed, upstream_of(group.rank(), splits)))

    simulation = simulate(world_size, step)
    assert all(not any(call.copied_bytes) for call in calls_of(simulation))
    for rank, gradients in enumerate(simulation.results):
        for gradient, expected in zip(gradients, expected_gradients(rank, splits), strict=True):
            assert_same_bits(gradient.flatten(1, 2), expected, f"rank {rank}")


def test_ranks_go_apart_whatever_their_own_gradients_look_like(large: None) -> None:
    """How many collectives there are must not depend on one rank's strides."""
    splits = (4, 3)

    def step(group: dist.ProcessGroup) -> list[torch.Tensor]:
        leaves, upstream = leaves_of(group.rank(), splits), upstream_of(group.rank(), splits)
        if group.rank() == 0:  # views of one buffer, as an attention may hand them back
            upstream = list(torch.cat(upstream, dim=1).split(COUNTS, dim=1))
        else:
            upstream[1] = upstream[1].transpose(0, 2).contiguous().transpose(0, 2)
        results = scatter_heads_gather_seqlen(leaves, splits, group)
        return list(torch.autograd.grad(results, leaves, upstream))

    for rank, gradients in enumerate(simulate(2, step).results):
        for gradient, expected in zip(gradients, expected_gradients(rank, splits), strict=True):
            assert_same_bits(gradient, expected, f"rank {rank}")


def test_large_gradients_of_shared_heads_are_summed(large: None) -> None:
    """Grouped queries: a key head that both ranks have gets the gradients of both."""
    splits, query = (3, 2), HeadSplit.of_counts([2, 2])
    shared = HeadSplit(1, ((0, 1), (0, 1)))

    def step(group: dist.ProcessGroup) -> list[torch.Tensor]:
        rank = group.rank()
        q = values(splits[rank], 4, HEAD_DIM, seed=rank).requires_grad_()
        k = values(splits[rank], 1, HEAD_DIM, seed=5 + rank).requires_grad_()
        results = scatter_heads_gather_seqlen([q, k], splits, group, head_splits=[query, shared])
        upstream = [torch.full_like(result, float(1 + rank)) for result in results]
        return list(torch.autograd.grad(results, [q, k], upstream))

    for q_grad, k_grad in simulate(2, step).results:
        assert (q_grad[:, :2] == 1).all()
        assert (q_grad[:, 2:] == 2).all()
        assert (k_grad == 3).all()


def test_small_gradients_share_a_collective() -> None:
    splits = (4, 3)

    def step(group: dist.ProcessGroup) -> list[torch.Tensor]:
        leaves = leaves_of(group.rank(), splits)
        results = scatter_heads_gather_seqlen(leaves, splits, group)
        return list(torch.autograd.grad(results, leaves, upstream_of(group.rank(), splits)))

    assert len(calls_of(simulate(2, step))) == 2, "one forward, one back"


@every_world
@pytest.mark.parametrize("apart", [True, False])
def test_a_workspace_serves_backward_too(
    world_size: int, splits: tuple[int, ...], apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if apart:
        monkeypatch.setattr(transfer, "APART_BYTES", 0)
    rounds, steady = 8, 6

    def step(group: dist.ProcessGroup) -> tuple[list[int], list[list[torch.Tensor]]]:
        rank, workspace = group.rank(), Workspace()
        leaves = leaves_of(rank, splits)
        output = values(sum(splits), 2, HEAD_DIM, seed=rank).requires_grad_()
        allocations, kept = [], []
        for number in range(rounds):
            results = scatter_heads_gather_seqlen(leaves, splits, group, workspace=workspace)
            flat = scatter_seqlen_gather_heads(output, splits, group, workspace=workspace)
            shards = scatter_seqlen_gather_head_shards(output, splits, group, workspace=workspace)
            (flat.sum() + 2 * shards.sum()).backward()
            upstream = upstream_of(rank, splits, step=number)
            gradients = torch.autograd.grad(results, leaves, upstream)
            assert output.grad is not None
            assert (output.grad == 3 * (number + 1)).all()
            if number >= steady:  # from now on they are held, and must not be written to
                kept.append(list(gradients))
            del results, flat, shards, gradients
            allocations.append(workspace.allocations)
        return allocations, kept

    for rank, (allocations, kept) in enumerate(simulate(world_size, step).results):
        # The simulator may hold on to what was sent for a moment longer: one more of each buffer.
        assert allocations[steady - 1] <= 2 * allocations[0], "a steady loop allocates"
        for number, gradients in enumerate(kept, start=steady):
            expected = expected_gradients(rank, splits, step=number)
            for gradient, want in zip(gradients, expected, strict=True):
                assert_same_bits(gradient, want, f"rank {rank}, round {number}")


@pytest.mark.usefixtures("large")
def test_large_exchanges_are_differentiable_twice() -> None:
    splits = (3, 4)

    def step(group: dist.ProcessGroup) -> list[torch.Tensor]:
        leaves = leaves_of(group.rank(), splits)
        results = scatter_heads_gather_seqlen(leaves, splits, group)
        loss = sum((result**3).sum() for result in results)
        gradients = torch.autograd.grad(loss, leaves, create_graph=True)
        return list(torch.autograd.grad(sum(g.sum() for g in gradients), leaves))

    for rank, seconds in enumerate(simulate(2, step).results):
        for leaf, second in zip(leaves_of(rank, splits), seconds, strict=True):
            torch.testing.assert_close(second, 6 * leaf.detach())
