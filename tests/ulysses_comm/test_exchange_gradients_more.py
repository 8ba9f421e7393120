"""Gradients of the exchanges in use: twice over, in a model, recomputed, under DDP and FSDP2.

Every comparison is with the unsharded formulation or with finite differences.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.ranks import run_ranks
from tests.traffic import calls_of
from ulysses_comm import (
    HeadSplit,
    local_kv_heads,
    pack_head_shards,
    scatter_heads_gather_seqlen,
    scatter_seqlen_gather_head_shards,
    scatter_seqlen_gather_heads,
    scatter_seqlen_gather_heads_each,
    simulate,
    simulate_world,
    split_query_groups,
)

FP64 = torch.float64


# Finite differences. The ranks together are one function of all their inputs; a simulation inside
# an autograd.Function makes it one, and its backward runs in the ranks again.

Step = Callable[[dist.ProcessGroup, list[torch.Tensor]], list[torch.Tensor]]


@dataclass(frozen=True)
class World:
    """`step` on every rank, as a function of the inputs of all ranks."""

    splits: tuple[int, ...]
    step: Step
    inputs: tuple[tuple[torch.Tensor, ...], ...]  # by rank

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _Forward.apply(self, *tensors)

    def of_rank(self, tensors: Sequence[torch.Tensor], rank: int) -> list[torch.Tensor]:
        count = len(self.inputs[0])
        return [t.detach().requires_grad_() for t in tensors[rank * count : (rank + 1) * count]]

    def run(self, body: Callable[[dist.ProcessGroup], Sequence[torch.Tensor]]) -> tuple[Any, ...]:
        with torch.enable_grad():
            by_rank = simulate(len(self.splits), body).results
        return tuple(tensor.detach() for results in by_rank for tensor in results)


class _Forward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, world: World, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.world = world
        ctx.save_for_backward(*tensors)
        return world.run(lambda group: world.step(group, world.of_rank(tensors, group.rank())))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, *_Backward.apply(ctx.world, len(grads), *ctx.saved_tensors, *grads))


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, world: World, count: int, *tensors: torch.Tensor) -> Any:
        ctx.world, ctx.count = world, count
        ctx.save_for_backward(*tensors)

        def body(group: dist.ProcessGroup) -> Sequence[torch.Tensor]:
            return _first_derivative(world, group, tensors, count, create_graph=False)[2]

        return world.run(body)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        world, tensors, count = ctx.world, ctx.saved_tensors, ctx.count

        def body(group: dist.ProcessGroup) -> Sequence[torch.Tensor]:
            inputs, upstream, firsts = _first_derivative(
                world, group, tensors, count, create_graph=True
            )
            own = len(inputs)
            weights = grads[group.rank() * own : (group.rank() + 1) * own]
            return torch.autograd.grad(firsts, [*inputs, *upstream], weights)

        seconds = world.run(body)
        own, results = len(world.inputs[0]), count // len(world.splits)
        step = own + results
        by_rank = [seconds[i : i + step] for i in range(0, len(seconds), step)]
        inputs = [second for of_rank in by_rank for second in of_rank[:own]]
        upstream = [second for of_rank in by_rank for second in of_rank[own:]]
        return (None, None, *inputs, *upstream)


def _first_derivative(
    world: World,
    group: dist.ProcessGroup,
    tensors: Sequence[torch.Tensor],
    count: int,
    *,
    create_graph: bool,
) -> tuple[list[torch.Tensor], list[torch.Tensor], tuple[torch.Tensor, ...]]:
    """Return a rank's inputs, the gradients of its results, and the gradients of its inputs."""
    inputs = world.of_rank(tensors[:-count], group.rank())
    results = world.step(group, inputs)
    first = group.rank() * len(results)
    upstream = [
        t.detach().requires_grad_()
        for t in tensors[len(tensors) - count :][first : first + len(results)]
    ]
    firsts = torch.autograd.grad(results, inputs, upstream, create_graph=create_graph)
    return inputs, upstream, firsts


def curved(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Something with a second derivative, different for every tensor."""
    return [torch.sin((index + 1) * tensor) for index, tensor in enumerate(tensors)]


def world_of(
    splits: tuple[int, ...], shapes: Callable[[int], Sequence[tuple[int, ...]]], step: Step
) -> World:
    generator = torch.Generator().manual_seed(7)
    inputs = tuple(
        tuple(torch.rand(shape, generator=generator, dtype=FP64) for shape in shapes(rank))
        for rank in range(len(splits))
    )
    return World(splits, lambda group, tensors: curved(step(group, curved(tensors))), inputs)


def head_scatter(splits: tuple[int, ...], *, packed: bool = False) -> World:
    world_size = len(splits)

    def step(group: dist.ProcessGroup, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        passed = pack_head_shards(tensors, world_size) if packed else tensors
        return scatter_heads_gather_seqlen(passed, splits, group)

    return world_of(splits, lambda rank: [(splits[rank], world_size, 1)] * 2, step)


def shared_heads(splits: tuple[int, ...]) -> World:
    """Fewer key/value heads than ranks, of another head_dim, as they are."""
    head_splits = split_query_groups(len(splits), 1, len(splits))

    def step(group: dist.ProcessGroup, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return scatter_heads_gather_seqlen(
            tensors, splits, group, head_splits=head_splits, keep_dtypes=True
        )

    def shapes(rank: int) -> list[tuple[int, ...]]:
        return [(splits[rank], len(splits), 1), (splits[rank], 1, 2)]

    return world_of(splits, shapes, step)


def output(splits: tuple[int, ...], form: str) -> World:
    uneven = HeadSplit.of_counts([1 + (rank == 0) for rank in range(len(splits))])

    def step(group: dist.ProcessGroup, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if form == "each":
            return scatter_seqlen_gather_heads_each(
                tensors, splits, group, head_splits=[uneven] * 2, keep_dtypes=True
            )
        if form == "head shards":
            return [scatter_seqlen_gather_head_shards(tensors[0], splits, group)]
        return [scatter_seqlen_gather_heads(tensors[0], splits, group)]

    def shapes(rank: int) -> list[tuple[int, ...]]:
        if form == "each":
            return [(sum(splits), uneven.counts[rank], 1), (sum(splits), uneven.counts[rank], 2)]
        return [(sum(splits), 1, 2)]

    return world_of(splits, shapes, step)


SPLITS = {2: (2, 1), 3: (1, 0, 2), 4: (1, 0, 1, 1)}
FORMS: dict[str, Callable[[tuple[int, ...]], World]] = {
    "separate": head_scatter,
    "packed": functools.partial(head_scatter, packed=True),
    "shared heads": shared_heads,
    "output": functools.partial(output, form="flat"),
    "output as head shards": functools.partial(output, form="head shards"),
    "outputs of uneven heads": functools.partial(output, form="each"),
}


@pytest.mark.parametrize("world_size", SPLITS)
@pytest.mark.parametrize("form", FORMS)
def test_first_and_second_derivatives_equal_finite_differences(form: str, world_size: int) -> None:
    world = FORMS[form](SPLITS[world_size])
    tensors = [t.clone().requires_grad_() for of_rank in world.inputs for t in of_rank]
    assert torch.autograd.gradcheck(world, tensors)
    assert torch.autograd.gradgradcheck(world, tensors)


# A small transformer. Eight query heads on three or eight ranks, two key/value heads.

WIDTH, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 12, 8, 2, 4, 2


class Layer(torch.nn.Module):
    """Attention and a feed-forward part, on local tokens; `group` None is the unsharded layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        self.out = torch.nn.Linear(HEADS * HEAD_DIM, WIDTH)
        self.up = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.down = torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, splits: Sequence[int], group: Any) -> torch.Tensor:
        counts = [HEADS, KV_HEADS, KV_HEADS]
        q, k, v = self.qkv(self.norm(x)).unflatten(1, (-1, HEAD_DIM)).split(counts, dim=1)
        x = x + self.out(attend(q, k, v, splits, group).flatten(1))
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, splits: Sequence[int], group: Any
) -> torch.Tensor:
    if group is None:
        group_size = HEADS // KV_HEADS
        return attention(q, *(t.repeat_interleave(group_size, dim=1) for t in (k, v)))
    query, key_value = split_query_groups(HEADS, KV_HEADS, group.size())
    q, k, v = scatter_heads_gather_seqlen(
        [q, k, v], splits, group, head_splits=[query, key_value, key_value]
    )
    read = local_kv_heads(query, key_value, group.rank())
    output = attention(q, k[:, read], v[:, read]).contiguous()
    return scatter_seqlen_gather_heads(output, splits, group, head_split=query)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("shd,thd->hst", q, k) / HEAD_DIM**0.5
    return torch.einsum("hst,thd->shd", scores.softmax(-1), v)


class Transformer(torch.nn.Module):
    """A stack of layers; `recompute` names the form of activation checkpointing."""

    def __init__(self, recompute: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.recompute = recompute
        self.to(FP64)

    def forward(self, x: torch.Tensor, splits: Sequence[int], group: Any) -> torch.Tensor:
        for layer in self.layers:
            if self.recompute is None:
                x = layer(x, splits, group)
            else:
                reentrant = self.recompute == "reentrant"
                x = checkpoint(layer, x, splits, group, use_reentrant=reentrant)
        return x


def whole_input(seqlen: int) -> torch.Tensor:
    return torch.randn(seqlen, WIDTH, generator=torch.Generator().manual_seed(5), dtype=FP64)


def loss_of(output: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The sum over this rank's tokens of something that weighs every channel differently."""
    return (output.tanh() * weight).sum()


def weight_of(seqlen: int) -> torch.Tensor:
    return torch.randn(seqlen, WIDTH, generator=torch.Generator().manual_seed(6), dtype=FP64)


def unsharded(seqlen: int) -> dict[str, torch.Tensor]:
    """Return the gradients of a single process: of the input, and of every parameter."""
    model, x = Transformer(), whole_input(seqlen).requires_grad_()
    loss_of(model(x, [seqlen], None), weight_of(seqlen)).backward()
    assert x.grad is not None
    return {"input": x.grad} | gradients_of(model)


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(grad is not None for grad in grads.values())
    return {name: grad for name, grad in grads.items() if grad is not None}


def sharded(
    group: dist.ProcessGroup, splits: Sequence[int], recompute: str | None = None
) -> dict[str, torch.Tensor]:
    """Return the gradients of one rank, whose loss is over its own tokens."""
    seqlen, rank = sum(splits), group.rank()
    model = Transformer(recompute)
    x = whole_input(seqlen).split(list(splits))[rank].clone().requires_grad_()
    weight = weight_of(seqlen).split(list(splits))[rank]
    loss_of(model(x, splits, group), weight).backward()
    assert x.grad is not None
    return {"input": x.grad} | gradients_of(model)


def assert_unsharded(by_rank: Sequence[dict[str, torch.Tensor]], seqlen: int) -> None:
    """The input's gradients join, and the parameters' add up, to those of a single process."""
    for name, want in unsharded(seqlen).items():
        grads = [grads[name] for grads in by_rank]
        got = torch.cat(grads) if name == "input" else torch.stack(grads).sum(0)
        assert want.abs().max() > 1e-3, f"{name}: a comparison with zeros proves nothing"
        # float64 and other orders of the same sums: far below any wrong factor.
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11, msg=name)


TRANSFORMER_SPLITS = [(7, 6), (0, 5), (5, 4, 4), (3, 0, 1, 5), (2, 1, 0, 3, 1, 1, 4, 0)]


@pytest.mark.parametrize("splits", TRANSFORMER_SPLITS, ids=lambda s: "-".join(map(str, s)))
def test_transformer_has_the_gradients_of_a_single_process(splits: tuple[int, ...]) -> None:
    """DeepSpeed #5248, VeOmni #338, verl #2857: gradients off by the size of the group."""
    simulation = simulate(len(splits), lambda group: sharded(group, splits))
    assert_unsharded(simulation.results, sum(splits))
    assert len(calls_of(simulation)) == 4 * LAYERS, "two exchanges a layer, forward and backward"


@pytest.mark.parametrize("recompute", ["reentrant", "non-reentrant"])
def test_activation_checkpointing_exchanges_again_and_keeps_the_gradients(recompute: str) -> None:
    splits = (3, 0, 4)
    simulation = simulate(3, lambda group: sharded(group, splits, recompute))
    assert_unsharded(simulation.results, sum(splits))
    assert len(calls_of(simulation)) == 6 * LAYERS


# DDP and FSDP2 around it: four ranks, two sequences of two ranks each.


def wrapped(wrapper: str, split_sizes: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """Train one step in a world of (data, sequence) ranks; return whole gradients."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    splits = split_sizes[mesh.get_local_rank("data")]
    rank = mesh.get_local_rank("sequence")
    model: torch.nn.Module = Transformer()
    if wrapper == "DDP":
        model = DistributedDataParallel(model)
    else:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["data", "sequence"]._flatten("all"))
        fully_shard(model, mesh=mesh["data", "sequence"]._flatten("all"))
    x = whole_input(sum(splits)).split(list(splits))[rank]
    weight = weight_of(sum(splits)).split(list(splits))[rank]
    loss_of(model(x, splits, mesh["sequence"].get_group()), weight).backward()
    grads = gradients_of(model.module if wrapper == "DDP" else model)
    return {
        name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        for name, grad in grads.items()
    }


def assert_mean_over_the_world(
    by_rank: Sequence[dict[str, torch.Tensor]], split_sizes: Sequence[Sequence[int]]
) -> None:
    """DDP and FSDP2 average over all ranks, the sequence's too: the sum is four times that."""
    references = [unsharded(sum(splits)) for splits in split_sizes]
    for grads in by_rank:
        for name, grad in grads.items():
            want = sum(reference[name] for reference in references) / 4
            torch.testing.assert_close(grad, want, rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_wrapped_transformer_has_the_mean_gradients(wrapper: str) -> None:
    split_sizes = [(3, 2), (0, 4)]
    simulation = simulate_world(4, lambda: wrapped(wrapper, split_sizes))
    assert_mean_over_the_world(simulation.results, split_sizes)


def wrapped_on_gloo(_: dist.ProcessGroup, split_sizes: Any) -> list[dict[str, torch.Tensor]]:
    return [wrapped(wrapper, split_sizes) for wrapper in ("DDP", "FSDP2")]


@pytest.mark.gloo
def test_wrapped_transformer_has_the_mean_gradients_on_real_processes() -> None:
    split_sizes = [(3, 2), (0, 4)]
    by_rank = run_ranks(wrapped_on_gloo, 4, split_sizes)
    for index in range(2):
        assert_mean_over_the_world([results[index] for results in by_rank], split_sizes)


# What backward copies: as the opposite exchange does.


@pytest.mark.parametrize(
    "form",
    [
        "separate",  # a pack there; back, the three gradients into one buffer, and out of it, flat
        "packed",  # our own pack copies before the exchange; its views come back as views
        "one tensor",  # its gradient is a buffer of its own, and goes back in place
    ],
)
def test_backward_of_the_head_scatter_copies_as_the_output_exchange(form: str) -> None:
    splits, count = (3, 2), 1 if form == "one tensor" else 3

    def step(group: dist.ProcessGroup) -> None:
        tensors = [torch.randn(splits[group.rank()], 4, 8).requires_grad_() for _ in range(count)]
        passed = pack_head_shards(tensors, 2) if form == "packed" else tensors
        results = scatter_heads_gather_seqlen(passed, splits, group)
        torch.autograd.backward(results, [torch.randn(result.shape) for result in results])

    simulation = simulate(2, step)
    # On rank 0: 3 tokens of 4 heads; 5 tokens of its own 2.
    scattered, gathered = count * 3 * 4 * 8 * 4, count * 5 * 2 * 8 * 4
    assert [call.copied_bytes[0] for call in calls_of(simulation)] == {
        "separate": [scattered, gathered + scattered],
        "packed": [0, gathered],
        "one tensor": [scattered, scattered],
    }[form]


@pytest.mark.parametrize("flat", [True, False], ids=["flat", "head shards"])
def test_backward_of_the_output_exchange_copies_as_the_head_scatter(flat: bool) -> None:
    splits = (3, 2)

    def step(group: dist.ProcessGroup) -> None:
        tensor = torch.randn(5, 2, 8).requires_grad_()
        if flat:
            result = scatter_seqlen_gather_heads(tensor, splits, group)
        else:
            result = scatter_seqlen_gather_head_shards(tensor, splits, group)
        # Head shards of a send buffer of their own go back in place.
        grad = torch.randn(result.shape)
        result.backward(grad if flat else grad.transpose(0, 1).contiguous().transpose(0, 1))

    there, back = [call.copied_bytes[0] for call in calls_of(simulate(2, step))]
    assert (there, back) == ((3 * 4 * 8 * 4,) * 2 if flat else (0, 0))
