"""Inputs that require grad: right gradients, compared with the unsharded formulation.

The exchanges only move, so a gradient is the upstream gradient moved back: compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import cases, reference
from tests.bits import assert_same_bits
from tests.cases import BF16, FP32, HEAD_DIM
from tests.ranks import run_ranks
from tests.traffic import calls_of
from ulysses_comm import (
    LONE_RANK,
    pack_head_shards,
    scatter_heads_gather_seqlen,
    scatter_seqlen_gather_head_shards,
    scatter_seqlen_gather_heads,
    simulate,
)

WORLDS = [(2, (7, 6)), (2, (0, 5)), (4, (5, 4, 4, 4)), (4, (2, 0, 0, 1)), (3, (0, 7, 1))]
every_world = pytest.mark.parametrize(("world_size", "splits"), WORLDS, ids=cases.split_name)


def values(*shape: int, seed: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def local_inputs(
    rank: int, splits: tuple[int, ...], counts: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> list[torch.Tensor]:
    return [
        values(splits[rank], len(splits) * n, HEAD_DIM, seed=100 * rank + i, dtype=dtype)
        for i, (n, dtype) in enumerate(zip(counts, dtypes, strict=True))
    ]


def expected_input_gradients(
    upstream: list[list[torch.Tensor]], splits: tuple[int, ...], rank: int
) -> list[torch.Tensor]:
    """Return for each input of a rank the upstream gradients of its tokens, all heads in order.

    Args:
        upstream: For every rank the gradient of each of its results `[S, H_i, D]`.
        splits: Tokens of every rank.
        rank: The rank whose inputs' gradients are wanted.
    """
    return [
        reference.scatter_seqlen_heads([grads[index] for grads in upstream], splits, rank)
        for index in range(len(upstream[0]))
    ]


@every_world
@pytest.mark.parametrize("form", ["separate", "packed", "leaf head shards"])
@pytest.mark.parametrize("dtypes", [(FP32,) * 3, (BF16,) * 3, (BF16, FP32, BF16)], ids=str)
def test_gradient_of_the_head_scatter_is_the_upstream_moved_back(
    world_size: int, splits: tuple[int, ...], form: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    counts = (2, 1, 1)
    if form == "leaf head shards" and len(set(dtypes)) > 1:
        dtypes = (FP32,) * 3
    common = FP32 if FP32 in dtypes else BF16
    upstream = [
        [
            values(sum(splits), n, HEAD_DIM, seed=900 + 10 * r + i, dtype=common)
            for i, n in enumerate(counts)
        ]
        for r in range(world_size)
    ]

    def step(group: dist.ProcessGroup) -> list[torch.Tensor | None]:
        rank = group.rank()
        leaves = [t.requires_grad_() for t in local_inputs(rank, splits, counts, dtypes)]
        passed: list[torch.Tensor] = list(leaves)
        if form == "packed":
            passed = pack_head_shards(leaves, world_size)
        elif form == "leaf head shards":
            leaves = [leaf.detach().unflatten(1, (world_size, -1)) for leaf in leaves]
            leaves = passed = [leaf.clone().requires_grad_() for leaf in leaves]
        results = scatter_heads_gather_seqlen(passed, splits, group)
        assert all(result.requires_grad for result in results)
        torch.autograd.backward(results, upstream[rank])
        return [leaf.grad for leaf in leaves]

    simulation = simulate(world_size, step)
    assert len(calls_of(simulation)) == 2, "one exchange forward, one backward"
    for rank, grads in enumerate(simulation.results):
        expected = expected_input_gradients(upstream, splits, rank)
        for index, (grad, want) in enumerate(zip(grads, expected, strict=True)):
            assert grad is not None
            want = want.to(dtypes[index])
            assert_same_bits(grad.flatten(1, -2), want.reshape(grad.flatten(1, -2).shape))


@every_world
@pytest.mark.parametrize("flat", [True, False], ids=["flat", "head shards"])
def test_gradient_of_the_output_exchange_is_the_upstream_moved_back(
    world_size: int, splits: tuple[int, ...], flat: bool
) -> None:
    heads = 3
    upstream = [
        values(splits[r], world_size * heads, HEAD_DIM, seed=700 + r) for r in range(world_size)
    ]

    def step(group: dist.ProcessGroup) -> torch.Tensor | None:
        output = values(sum(splits), heads, HEAD_DIM, seed=group.rank()).requires_grad_()
        grad = upstream[group.rank()]
        if flat:
            result = scatter_seqlen_gather_heads(output, splits, group)
        else:
            result = scatter_seqlen_gather_head_shards(output, splits, group)
            grad = grad.unflatten(1, (world_size, heads))
        assert result.requires_grad
        result.backward(grad)
        return output.grad

    for rank, grad in enumerate(simulate(world_size, step).results):
        (want,) = reference.scatter_heads_results([[u] for u in upstream], rank)
        assert grad is not None
        assert_same_bits(grad, want, f"rank {rank}")


def test_each_input_alone_gets_its_gradient() -> None:
    """DeepSpeed #8491: a gradient may be zero for one tensor and right for the next."""
    splits, counts = (3, 0, 4), (2, 1, 1)
    for tracked in range(3):

        def step(group: dist.ProcessGroup, tracked: int = tracked) -> list[torch.Tensor | None]:
            leaves = local_inputs(group.rank(), splits, counts, (FP32,) * 3)
            leaves[tracked].requires_grad_()
            results = scatter_heads_gather_seqlen(leaves, splits, group)
            (results[tracked] * (1 + group.rank())).sum().backward()
            return [leaf.grad for leaf in leaves]

        for rank, grads in enumerate(simulate(3, step).results):
            assert [grad is not None for grad in grads] == [i == tracked for i in range(3)]
            grad = grads[tracked]
            assert grad is not None
            # Heads of rank r were scaled by 1 + r.
            scale = torch.arange(1.0, 4.0).repeat_interleave(counts[tracked])
            assert_same_bits(grad, scale.view(1, -1, 1).expand(splits[rank], -1, HEAD_DIM))


def test_results_that_no_loss_uses_give_zero_gradients() -> None:
    splits = (2, 3)

    def step(group: dist.ProcessGroup) -> list[torch.Tensor | None]:
        leaves = [
            t.requires_grad_() for t in local_inputs(group.rank(), splits, (1, 2), (FP32,) * 2)
        ]
        q, _ = scatter_heads_gather_seqlen(leaves, splits, group)
        q.sum().backward()
        return [leaf.grad for leaf in leaves]

    for q_grad, k_grad in simulate(2, step).results:
        assert (q_grad == 1).all()
        assert k_grad is None or not k_grad.any()


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("shd,thd->hst", q, k) / q.shape[-1] ** 0.5
    return torch.einsum("hst,thd->shd", scores.softmax(-1), v)


def sharded_attention_gradients(
    group: dist.ProcessGroup, splits: tuple[int, ...], form: str
) -> list[torch.Tensor]:
    """One sharded attention layer, forward and backward; the loss weighs every element."""
    rank, world_size = group.rank(), group.size()
    whole = unsharded_inputs(splits)
    leaves = [t.split(splits)[rank].clone().requires_grad_() for t in whole]
    passed = pack_head_shards(leaves, world_size) if form == "packed" else leaves
    q, k, v = scatter_heads_gather_seqlen(passed, splits, group)
    output = attention(q, k, v).contiguous()
    if form == "packed":
        shards = scatter_seqlen_gather_head_shards(output, splits, group)
        local = shards.flatten(1, 2)
    else:
        local = scatter_seqlen_gather_heads(output, splits, group)
    weight = loss_weight(splits).split(splits)[rank]
    (local * weight).sum().backward()
    grads = [leaf.grad for leaf in leaves]
    assert all(grad is not None for grad in grads)
    return [local.detach(), *(grad for grad in grads if grad is not None)]


def unsharded_inputs(splits: tuple[int, ...]) -> list[torch.Tensor]:
    heads = 2 * len(splits)
    return [values(sum(splits), heads, 8, seed=i, dtype=torch.float64) for i in range(3)]


def loss_weight(splits: tuple[int, ...]) -> torch.Tensor:
    return values(sum(splits), 2 * len(splits), 8, seed=77, dtype=torch.float64)


def assert_equals_unsharded(results: list[list[torch.Tensor]], splits: tuple[int, ...]) -> None:
    leaves = [t.requires_grad_() for t in unsharded_inputs(splits)]
    output = attention(*leaves)
    (output * loss_weight(splits)).sum().backward()
    expected = [output.detach(), *(leaf.grad for leaf in leaves)]
    for index, want in enumerate(expected):
        assert want is not None
        assert want.abs().max() > 0.01, "a comparison with zeros proves nothing"
        joined = torch.cat([of_rank[index] for of_rank in results])
        # Same sums over other head counts at a time: float64 rounding, far below any wrong factor.
        torch.testing.assert_close(joined, want, rtol=1e-10, atol=1e-12)


@every_world
@pytest.mark.parametrize("form", ["separate", "packed"])
def test_attention_layer_has_the_unsharded_gradients(
    world_size: int, splits: tuple[int, ...], form: str
) -> None:
    simulation = simulate(
        world_size, lambda group: sharded_attention_gradients(group, splits, form)
    )
    assert_equals_unsharded(simulation.results, splits)
    assert len(calls_of(simulation)) == 4, "two exchanges forward, two backward"


def gradients_on_gloo(
    group: dist.ProcessGroup, all_splits: list[tuple[int, ...]]
) -> list[list[torch.Tensor]]:
    return [
        sharded_attention_gradients(group, splits, form)
        for splits in all_splits
        for form in ("separate", "packed")
    ]


@pytest.mark.gloo
@pytest.mark.parametrize("world_size", [2, 4])
def test_attention_layer_has_the_unsharded_gradients_on_real_processes(world_size: int) -> None:
    all_splits = [splits for world, splits in WORLDS if world == world_size]
    by_rank = run_ranks(gradients_on_gloo, world_size, all_splits)
    for index, splits in enumerate(splits for splits in all_splits for _ in range(2)):
        assert_equals_unsharded([results[index] for results in by_rank], splits)


@pytest.mark.parametrize("scope", [torch.no_grad, torch.inference_mode])
def test_nothing_is_tracked_where_grad_mode_is_off(scope: Callable[[], Any]) -> None:
    splits = (2, 3)

    def step(group: dist.ProcessGroup) -> list[torch.Tensor]:
        leaves = [
            t.requires_grad_() for t in local_inputs(group.rank(), splits, (1, 2), (FP32,) * 2)
        ]
        with scope():
            results = scatter_heads_gather_seqlen(leaves, splits, group)
            back = scatter_seqlen_gather_heads(results[0].contiguous(), splits, group)
        assert_same_bits(back, leaves[0])
        return [*results, back]

    for results in simulate(2, step).results:
        assert not any(result.requires_grad for result in results)


def test_a_lone_rank_passes_gradients_through() -> None:
    leaves = [t.requires_grad_() for t in local_inputs(0, (4,), (2, 1), (FP32,) * 2)]
    q, k = scatter_heads_gather_seqlen(pack_head_shards(leaves, 1), [4], LONE_RANK)
    flat = scatter_seqlen_gather_heads(q * 2, [4], LONE_RANK)
    shards = scatter_seqlen_gather_head_shards(k * 3, [4], LONE_RANK)
    (flat.sum() + shards.sum()).backward()
    assert (leaves[0].grad == 2).all()
    assert (leaves[1].grad == 3).all()


def test_mixed_dtypes_that_are_kept_are_never_cut_off_silently() -> None:
    """A byte view drops gradients: the exchange gives right ones, or refuses before it sends."""
    splits = (2, 3)

    def step(group: dist.ProcessGroup) -> list[torch.Tensor | None] | str:
        leaves = [
            t.requires_grad_() for t in local_inputs(group.rank(), splits, (1, 2), (FP32, BF16))
        ]
        try:
            results = scatter_heads_gather_seqlen(leaves, splits, group, keep_dtypes=True)
        except (RuntimeError, ValueError) as error:
            return str(error)
        sum(result.float().sum() for result in results).backward()
        return [leaf.grad for leaf in leaves]

    simulation = simulate(2, step)
    for outcome in simulation.results:
        if isinstance(outcome, str):
            assert "keep_dtypes" in outcome
            assert "grad" in outcome
            assert calls_of(simulation) == []
        else:
            assert all(grad is not None and (grad == 1).all() for grad in outcome)


def test_flattened_head_shards_and_packs_are_differentiable() -> None:
    from ulysses_comm import flatten_head_shards

    leaf = values(4, 6, HEAD_DIM, seed=1).requires_grad_()
    views = pack_head_shards([leaf, leaf * 2], 3)
    weights = values(4, 6, HEAD_DIM, seed=2)
    sum((flatten_head_shards(view) * weights).sum() for view in views).backward()
    assert leaf.grad is not None
    assert_same_bits(leaf.grad, weights + weights * 2)
