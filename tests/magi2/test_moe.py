"""The mixture's branch: the experts that every token uses, activated apart and together."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch

from magi2 import presets
from magi2.compiling import RegionCompiler
from magi2.modules.moe import MultiHeadMoe
from magi2.modules.request import RequestPlan
from magi2.ops.swiglu import LIMIT, swiglu7_torch
from tests.bits import assert_same_bits
from tests.magi2.packed import grid
from tests.magi2.sharded import model_of

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def nan_filled_empty():
    """No filling: it would be part of what is compiled."""


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def branch(
    sizes: tuple[int, ...], dtype: torch.dtype
) -> tuple[MultiHeadMoe, torch.Tensor, RequestPlan]:
    """A layer's mixture with rows of these modalities, which its norm makes 40 times as large."""
    config = presets.tiny(dtype)
    model = model_of(config)
    moe = copy.deepcopy(model.block.layers[1].mlp).requires_grad_(False)
    moe.pre_norm.weight.fill_(39.0)  # an offset from 1
    modality = torch.arange(3).repeat_interleave(torch.tensor(sizes))
    plan = model.plan(grid((len(modality), 1, 1)), modality, [0, len(modality)])
    return moe, torch.randn(len(modality), config.hidden_size).to(dtype), plan


def joined(moe: MultiHeadMoe, u: torch.Tensor, plan: RequestPlan) -> torch.Tensor:
    """The second result of `project`, both experts activated as one: what an older form did."""
    sizes = plan.order.group_sizes
    x = moe.pre_norm(u, sizes)
    inner = torch.cat(
        [moe.shared_expert_fc1(x, sizes), moe.modality_specific_shared_expert_fc1(x, sizes)], dim=1
    )
    last = (moe.shared_expert_fc2, moe.modality_specific_shared_expert_fc2)
    parts = swiglu7_torch(inner).split([fc2.weight.shape[1] for fc2 in last], dim=1)
    shared, own = (fc2(part.contiguous(), sizes) for fc2, part in zip(last, parts, strict=True))
    return shared + own


@pytest.mark.parametrize(
    "sizes", [(7, 4, 3), (1, 0, 0), (0, 0, 1), (0, 0, 0), (5, 0, 2), (0, 6, 0), (13, 1, 9)]
)
def test_experts_activated_apart_have_the_bits_of_one_activation_and_stay_dense(sizes):
    # Not in float32: there a row's tail may go through another exponential, see test_ops.py.
    moe, u, plan = branch(sizes, BF16)
    expected, given = joined(moe, u, plan), []
    for fc2 in (moe.shared_expert_fc2, moe.modality_specific_shared_expert_fc2):
        fc2.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    assert_same_bits(moe.project(u, plan)[1], expected)
    assert [inner.shape[1] for inner in given] == [64, 32]
    assert all(inner.is_contiguous() for inner in given)
    inner = moe.shared_expert_fc1(moe.pre_norm(u, sizes), sizes)
    assert not u.numel() or (inner.abs() > LIMIT).float().mean() > 0.5


# Compiles of seconds each: one that has all modalities, and the others if asked for.
COMPILED = [
    pytest.param(sizes, dtype, marks=pytest.mark.long if number else ())
    for number, (sizes, dtype) in enumerate(
        product([(13, 4, 9), (29, 0, 0), (0, 0, 31)], (BF16, FP32))
    )
]


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(("sizes", "dtype"), COMPILED)
def test_experts_activated_apart_and_as_one_compile_to_the_same_bits(sizes, dtype):
    moe, u, plan = branch(sizes, dtype)
    options = RegionCompiler(dynamic=False, deterministic=True).options
    apart, together = (
        torch.compile(form, fullgraph=True, dynamic=False, options=options)
        for form in (MultiHeadMoe.project, joined)
    )
    assert_same_bits(apart(moe, u, plan)[1], together(moe, u, plan))
