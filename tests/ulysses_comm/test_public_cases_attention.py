"""Faults that users of other libraries reported, as far as they concern the attention layer.

Those about exchanges alone are in test_public_cases.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.bits import assert_same_bits, random_bits
from tests.traffic import calls_of
from tests.ulysses_comm.attention_cases import close, inputs, integer_mix, sdpa_of
from ulysses_comm import (
    UlyssesAttention,
    balanced_split_sizes,
    gather_sequence,
    shard_sequence,
    simulate,
    simulate_world,
    sum_gradients,
    sum_losses,
)


def attend_balanced(
    length: int, world_size: int, heads: tuple[int, int], **options: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor], Any]:
    """Run one layer over balanced shards; return its outputs, the whole inputs and the record."""
    whole = [t.mul(9).round() for t in inputs("bshd", heads, length=length, batch=1)]
    splits = balanced_split_sizes(length, world_size)

    def step(group: dist.ProcessGroup) -> torch.Tensor:
        layer = UlyssesAttention(integer_mix, group=group, layout="bshd", **options)
        local = [shard_sequence(t, group, splits) for t in whole]
        return layer(*local, split_sizes=splits)

    simulation = simulate(world_size, step)
    return simulation.results, whole, simulation


@pytest.mark.parametrize(("length", "world_size"), [(7, 2), (10, 4), (8423, 8), (3, 4)])
def test_lengths_that_the_group_does_not_divide_equal_one_process(
    length: int, world_size: int
) -> None:
    """DeepSpeed #7384, #7868, #5177; vllm-omni #492, #672; diffusers #12706, #12996."""
    results, whole, _ = attend_balanced(length, world_size, (8, 8))
    joined = torch.cat(results, dim=1)
    assert joined.shape[1] == length
    assert_same_bits(joined, integer_mix(*whole))


@pytest.mark.parametrize(
    ("heads", "world_size"), [(28, 8), (7, 4), (12, 8), (20, 8), (5, 8), (1, 4)]
)
def test_head_counts_that_the_group_does_not_divide(heads: int, world_size: int) -> None:
    """long-context-attention #154, xDiT #471, LongPO #5: no padding, every head once."""
    results, whole, simulation = attend_balanced(16, world_size, (heads, heads))
    assert_same_bits(torch.cat(results, dim=1), integer_mix(*whole))
    sent = sum(sum(map(sum, call.bytes_by_pair)) for call in calls_of(simulation))
    own = sum(tensor.nbytes for tensor in (*whole, whole[0]))
    assert sent == own, "padding heads travelled"


@pytest.mark.parametrize(
    ("heads", "world_size"),
    [((40, 8), 10), ((40, 8), 20), ((40, 8), 40), ((8, 2), 4), ((8, 2), 8), ((16, 1), 4)],
)
def test_fewer_key_heads_than_ranks(heads: tuple[int, int], world_size: int) -> None:
    """verl #1226, prime-rl #3042, ArcticInference #175: heads go to the ranks that read them."""
    results, whole, _ = attend_balanced(world_size + 3, world_size, heads)
    assert_same_bits(torch.cat(results, dim=1), integer_mix(*whole))


@pytest.mark.parametrize("heads", [(10, 2), (6, 2)])
def test_each_query_head_meets_its_key_head(heads: tuple[int, int]) -> None:
    """vllm-omni #5716: padding query and KV heads apart breaks the ratio."""
    for chunks in (1, 2):
        results, whole, _ = attend_balanced(9, 4, heads, chunks=chunks)
        assert_same_bits(torch.cat(results, dim=1), integer_mix(*whole))


class Layer(nn.Module):
    """Projections around an attention, all in float64."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.qkv = nn.Linear(12, 36)
        self.out = nn.Linear(12, 12)
        self.attention = attention

    def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (6, 2)) for t in self.qkv(x).chunk(3, dim=-1))
        return self.out(self.attention(q, k, v, **kwargs).flatten(2))


class Local(nn.Module):
    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return sdpa_of("bshd")(*tensors)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("whole_loss", [False, True], ids=["loss of shards", "loss of the whole"])
def test_parameter_gradients_are_those_of_one_process(world_size: int, whole_loss: bool) -> None:
    """DeepSpeed #5248, VeOmni #338, verl #2857: off by a factor of the group's size.

    The rule: losses of the ranks add up, gradients of the ranks add up.
    """
    torch.manual_seed(0)
    layer = Layer(Local()).double()
    x = torch.randn(2, 11, 12, dtype=torch.float64)
    target = torch.randn(2, 11, 12, dtype=torch.float64)
    (layer(x) - target).square().sum().div(2 * 11).backward()
    splits = balanced_split_sizes(11, world_size)

    def step(group: dist.ProcessGroup) -> list[torch.Tensor | None]:
        own = copy.deepcopy(layer)
        own.zero_grad()
        own.attention = UlyssesAttention(Local(), group=group, layout="bshd")
        y = own(shard_sequence(x, group, splits), split_sizes=splits)
        if whole_loss:
            y = gather_sequence(y, group, splits, loss="same")
            loss = (y - target).square().sum() / (2 * 11)
        else:
            part = (y - shard_sequence(target, group, splits)).square().sum() / (2 * 11)
            loss = sum_losses(part, group)
        loss.backward()
        sum_gradients(own.parameters(), group)
        return [parameter.grad for parameter in own.parameters()]

    for grads in simulate(world_size, step).results:
        for grad, parameter in zip(grads, layer.parameters(), strict=True):
            assert parameter.grad is not None
            close(grad, parameter.grad)


def test_a_replicated_prompt_is_not_gathered_world_size_times() -> None:
    """vllm-omni #347, #1233, #6930; sglang #18516, #19419."""
    lengths: list[int] = []

    def attention(*tensors: torch.Tensor) -> torch.Tensor:
        lengths.extend(tensor.shape[1] for tensor in tensors)
        return sdpa_of("bshd")(*tensors)

    def step(group: dist.ProcessGroup) -> tuple[int, int]:
        layer = UlyssesAttention(attention, group=group, layout="bshd")
        image, prompt = inputs("bshd", (4, 4), length=3), inputs("bshd", (4, 4), length=5)
        own, joint = layer.joint(*image, *prompt)
        return own.shape[1], joint.shape[1]

    assert simulate(4, step).results == [(3, 5)] * 4
    assert set(lengths) == {4 * 3 + 5}


def test_an_input_that_was_never_sharded_is_refused_before_data_moves() -> None:
    """vllm-omni #6841: it would make a sequence W times too long."""
    whole = inputs("bshd", (4, 4), length=12)

    def step(group: dist.ProcessGroup) -> None:
        layer = UlyssesAttention(sdpa_of("bshd"), group=group, layout="bshd")
        layer(*whole, split_sizes=balanced_split_sizes(12, 4))

    with pytest.raises(ValueError, match=r"12 tokens: expected split_sizes\[0\]=3"):
        simulate(4, step)


def test_a_missing_group_is_the_default_group_and_data_moves() -> None:
    """Megatron-Bridge #2667: each rank attended to its own slice, and nothing complained."""
    whole = inputs("bshd", (4, 4), length=8)

    def program() -> torch.Tensor:
        layer = UlyssesAttention(sdpa_of("bshd"), group=None, layout="bshd")
        return layer(*(shard_sequence(t, None) for t in whole))

    simulation = simulate_world(4, program)
    close(torch.cat(simulation.results, dim=1), sdpa_of("bshd")(*whole))
    assert len(calls_of(simulation)) == 2


@pytest.mark.parametrize("empty", [{0}, {1}, {3}, {0, 1, 3}], ids=str)
def test_ranks_without_tokens_leak_no_nan(empty: set[int]) -> None:
    """torchcomms #2632, pytorch #146468: zero-size bf16 messages yield NaN, or hang."""
    splits = [0 if rank in empty else 2 for rank in range(4)]

    def step(group: dist.ProcessGroup) -> torch.Tensor:
        tensors = [torch.ones(1, splits[group.rank()], 6, 4, dtype=torch.bfloat16)] * 3
        layer = UlyssesAttention(sdpa_of("bshd"), group=group, layout="bshd")
        return layer(*tensors, split_sizes=splits)

    for rank, output in enumerate(simulate(4, step).results):
        assert output.shape == (1, splits[rank], 6, 4)
        assert (output == 1).all()


def test_two_models_with_other_head_counts_do_not_share_state() -> None:
    """DeepSpeed #8291, #8316: the KV head count was process-wide."""
    models = [(8, 8), (8, 2), (6, 3), (5, 1)]
    tensors = [inputs("bshd", heads, length=8, seed=i) for i, heads in enumerate(models)]

    def step(group: dist.ProcessGroup) -> list[torch.Tensor]:
        layer = UlyssesAttention(sdpa_of("bshd"), group=group, layout="bshd")
        return [
            layer(*(shard_sequence(t, group) for t in whole)) for _ in range(2) for whole in tensors
        ]

    results = simulate(4, step).results
    for index in range(2 * len(models)):
        joined = torch.cat([outputs[index] for outputs in results], dim=1)
        close(joined, sdpa_of("bshd")(*tensors[index % len(models)]))


def awkward(form: str, tokens: int, heads: int, seed: int) -> torch.Tensor:
    dense = (
        random_bits((1, tokens, heads, 4), torch.float16, seed)
        .nan_to_num(0.5)
        .clamp(-2, 2)
        .double()
    )
    if form == "transposed":
        return dense.permute(0, 3, 1, 2).contiguous().permute(0, 2, 3, 1)
    if form == "sliced":
        return torch.cat([dense, dense], dim=2)[:, :, heads // 2 : heads // 2 + heads]
    if form == "expanded":
        return dense[:, :, :1].expand(-1, -1, heads, -1)
    return dense[:1, :1, :1, :1].expand(1, tokens, heads, 4)


@pytest.mark.parametrize("form", ["transposed", "sliced", "expanded", "stride 0 everywhere"])
def test_awkward_strides_are_right(form: str) -> None:
    """pytorch #141816, #94907, #79747; verl #7137: refused, or filled wrongly."""
    whole = [awkward(form, 8, heads, seed) for seed, heads in enumerate((6, 3, 3))]

    def step(group: dist.ProcessGroup) -> torch.Tensor:
        def attention(*tensors: torch.Tensor) -> torch.Tensor:
            output = sdpa_of("bshd")(*tensors)  # and an output that no one expects
            return output.transpose(1, 3).contiguous().transpose(1, 3)

        layer = UlyssesAttention(attention, group=group, layout="bshd")
        return layer(*(shard_sequence(t, group) for t in whole))

    close(torch.cat(simulate(2, step).results, dim=1), sdpa_of("bshd")(*whole))


def test_mixed_dtypes_come_back_as_they_are_in_the_keeping_mode() -> None:
    """yunchang packed, xfuser combined, SGLang packed, ringmaster: bf16 K/V came back as fp32."""
    dtypes = []

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        dtypes.append((q.dtype, k.dtype, v.dtype))
        return q.clone()

    q, k, v = inputs("bshd", (4, 2), length=8)
    mixed = (q.float().requires_grad_(), k.bfloat16().requires_grad_(), v.bfloat16())

    def step(group: dist.ProcessGroup) -> None:
        layer = UlyssesAttention(attention, group=group, layout="bshd", keep_dtypes=True)
        layer(*(shard_sequence(t, group) for t in mixed)).sum().backward()

    simulation = simulate(2, step)
    assert dtypes == [(torch.float32, torch.bfloat16, torch.bfloat16)] * 2
    assert len(calls_of(simulation)) == 4, "one each way, forward and backward"


@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (7, 7)])
def test_n_layers_make_exactly_2n_collectives(heads: tuple[int, int]) -> None:
    """accelerate #4209, vllm-omni #5717, #7120; verl #7417: no lengths gathered, Q, K, V in one."""
    splits = [2, 0, 3]

    def step(group: dist.ProcessGroup) -> None:
        layer = UlyssesAttention(sdpa_of("bshd"), group=group, layout="bshd", validate=True)
        q, k, v = (t.split(splits, dim=1)[group.rank()] for t in inputs("bshd", heads, length=5))
        for _ in range(5):
            q = layer(q, k, v, split_sizes=splits)

    kinds = [call.kind for call in calls_of(simulate(3, step))]
    assert kinds == ["all_to_all_single"] * 10


def test_every_refusal_holds_both_numbers() -> None:
    """MAGI-1 #38, #61: an assertion without a message when degrees do not multiply."""
    cases: list[tuple[list[tuple[int, ...]], dict[str, Any], list[str]]] = [
        ([(2, 7, 4), (2, 3, 4), (2, 3, 4)], {}, ["7", "3"]),
        ([(2, 8, 4)] * 3, {"split_sizes": [3, 2, 2, 2]}, ["2 tokens", "=3"]),
        ([(2, 8, 4)] * 3, {"split_sizes": [2, 2]}, ["2 entries", "4 ranks"]),
        ([(2, 8, 4), (2, 8, 4), (3, 8, 4)], {}, ["(2, 8, 4)", "(3, 8, 4)"]),
        ([(2, 8, 4)] * 3, {"attn_mask": torch.zeros(5, 8, 8)}, ["5", "8"]),
    ]
    for shapes, call, numbers in cases:

        def step(
            group: dist.ProcessGroup,
            shapes: list[tuple[int, ...]] = shapes,
            call: dict[str, Any] = call,
        ) -> None:
            tensors = [torch.zeros(shape) for shape in shapes]
            UlyssesAttention(sdpa_of("shd"), group=group)(*tensors, **call)

        with pytest.raises(ValueError) as caught:  # noqa: PT011  the numbers are checked below
            simulate(4, step)
        assert [number for number in numbers if number not in str(caught.value)] == []
