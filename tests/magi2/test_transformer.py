"""The whole model on one rank: gradients, options, and what it refuses."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from magi2 import presets
from magi2.initialise import initialise
from magi2.modules.modality import ModalityOrder
from magi2.modules.sequence import SequenceDispatcher
from magi2.options import Options, head_shards_by_default
from magi2.transformer import Magi2Transformer
from tests.magi2.packed import packed_pair
from tests.magi2.sharded import all_experts


def make(config, **kwargs):
    model = Magi2Transformer(config, **kwargs)
    initialise(model)
    return model


@pytest.fixture(scope="module")
def model():
    return make(presets.tiny_uneven(torch.float32))


@pytest.fixture
def packed(model):
    return packed_pair(model.config)


def test_text_and_narrow_columns_are_zero(model, packed):
    with torch.no_grad():
        out = model(*packed)
    assert out.shape == (len(packed.x), 8)
    assert out.dtype == torch.float32
    assert (out[packed.modality == 2] == 0).all()
    assert (out[packed.modality == 1][:, 6:] == 0).all()
    assert (out[packed.modality == 1][:, :6] != 0).all()
    assert (out[packed.modality == 0] != 0).all()


def test_sequences_do_not_see_each_other(model, packed):
    with torch.no_grad():
        out = model(*packed)
        end = int(packed.cu_seqlens[1])
        packed.x[end:] += 1.0
        changed = model(*packed)
    torch.testing.assert_close(changed[:end], out[:end], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(changed[end:], out[end:], rtol=1e-2, atol=1e-2)


def test_time_tokens_replace_the_first_channels(model, packed):
    with torch.no_grad():
        out = model(*packed)
        packed.time_tokens[0] += 1.0
        changed = model(*packed)
        none = model(*list(packed)[:4], torch.zeros(len(packed.x), 0))
    assert not torch.equal(changed, out)
    assert none.isfinite().all()


def test_time_modality_counts_as_text(model, packed):
    with torch.no_grad():
        out = model(*packed)
        packed.modality[packed.modality == 2] = 3
        assert torch.equal(model(*packed), out)


def test_a_plan_serves_every_step(model, packed):
    plan = model.plan(packed.coords, packed.modality, packed.cu_seqlens)
    with torch.no_grad():
        for step in range(2):
            packed.x += step
            assert torch.equal(model.run(packed.x, plan, packed.time_tokens), model(*packed))


def test_gradients_reach_every_parameter(model, packed):
    model.zero_grad()
    packed.x.requires_grad_()
    model(*packed).square().sum().backward()
    unused = []
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        if not parameter.grad.any():
            unused.append(name)
    assert not unused
    assert packed.x.grad is not None
    padding = int(packed.cu_seqlens[-2])
    assert packed.x.grad[:padding].any(dim=1).all()
    assert not packed.x.grad[padding:].any()
    model.zero_grad()


def test_gradients_are_the_slope_of_the_loss(packed):
    # Every expert chosen: a choice that flips would be a step in the loss. The direction moves
    # every parameter at once.
    model = make(all_experts(presets.tiny_uneven(torch.float32)))
    target = torch.randn(len(packed.x), 8)

    def loss() -> torch.Tensor:
        return (model(*packed) * target).double().sum()

    loss().backward()
    directions = [torch.randn_like(p) * p.detach().abs().mean() for p in model.parameters()]
    slope = sum(
        float((p.grad.double() * d.double()).sum())
        for p, d in zip(model.parameters(), directions, strict=True)
    )
    step, values = 1e-3, []
    for sign in (1, -2):
        with torch.no_grad():
            for parameter, direction in zip(model.parameters(), directions, strict=True):
                parameter += sign * step * direction
            values.append(float(loss()))
    measured = (values[0] - values[1]) / (2 * step)
    assert measured == pytest.approx(slope, rel=2e-2)


def test_gradients_flow_in_bfloat16(packed):
    model = make(presets.tiny_uneven())
    model(*packed).square().sum().backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(grad is not None and grad.isfinite().all() for grad in grads.values())
    assert grads["block.layers.1.mlp.moe_mlp.W_up"].dtype == torch.bfloat16


def test_sum_order_changes_bfloat16_roundings_only(packed):
    config = all_experts(presets.tiny_uneven())
    with torch.no_grad():
        once, often = (
            make(config, options=Options(route_sum=order))(*packed)
            for order in ("choice", "expert")
        )
    assert not torch.equal(once, often)
    error = (once - often).square().mean() / once.square().mean()
    assert error.sqrt() < 0.02


def test_router_bias_source_is_an_option(packed):
    config = presets.tiny_uneven(torch.float32)
    with torch.no_grad():
        ema, raw = (make(config, options=Options(router_bias=b))(*packed) for b in ("ema", "raw"))
    assert not torch.allclose(ema, raw, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("changes", [{"route_sum": "atomic"}, {"router_bias": "main"}])
def test_refuses_unknown_options(changes):
    with pytest.raises(ValueError, match="expected one of"):
        Options(**changes)


@pytest.mark.parametrize("name", ["qkv_head_shards", "output_head_shards"])
@pytest.mark.parametrize("value", ["auto", 1])
def test_refuses_a_layout_switch_that_is_no_switch(name, value):
    with pytest.raises(ValueError, match=f"{name}=.*expected True, False or None"):
        Options(**{name: value})


@pytest.mark.parametrize("device", ["cpu", "cuda", "meta", None])
def test_head_shards_are_the_default_where_they_are_known_to_be_read_well(device):
    assert head_shards_by_default(device)
    assert not head_shards_by_default("xpu")


def test_released_names_are_kept_when_a_state_dict_travels(model):
    state = model.state_dict()
    assert "block.layers.1.mlp.moe_mlp.router.expert_bias_ema" in state
    clone = Magi2Transformer(model.config)
    clone.load_state_dict(state)
    assert all(torch.equal(t, state[name]) for name, t in clone.state_dict().items())


BAD_INPUT = {
    "x of another rank": (lambda p: {"x": p.x[:, :, None]}, "x is .*expected .75, channels."),
    "x of another dtype": (lambda p: {"x": p.x.bfloat16()}, "x is .*bfloat16"),
    "x with too few tokens": (lambda p: {"x": p.x[1:]}, r"x is \(74, 24\)"),
    "x with too few channels": (lambda p: {"x": p.x[:, :8]}, "x has 8 channels: expected 24"),
    "time of another length": (lambda p: {"time_tokens": p.time_tokens[1:]}, "time_tokens is"),
    "time of another dtype": (lambda p: {"time_tokens": p.time_tokens.double()}, "float64"),
    "time wider than the streams": (
        lambda p: {"time_tokens": torch.zeros(75, 385)},
        "time_tokens has 385 columns: expected at most 384",
    ),
    "coords with too few columns": (lambda p: {"coords": p.coords[:, :8]}, r"coords is \(75, 8\)"),
    "coords of another dtype": (lambda p: {"coords": p.coords.long()}, "coords is .*int64"),
    "coords that are not finite": (
        lambda p: {"coords": p.coords.index_fill(0, torch.tensor([3]), float("nan"))},
        "coords of token 3",
    ),
    "a grid of one with another reference": (
        lambda p: {"coords": p.coords.index_fill(1, torch.tensor([3]), 1.0)},
        "reference size of 1 wherever",
    ),
    "modality of another length": (lambda p: {"modality": p.modality[1:]}, "modality has 74 ids"),
    "modality of another rank": (
        lambda p: {"modality": p.modality[None]},
        r"\(1, 75\) torch.int32",
    ),
    "modality of another dtype": (lambda p: {"modality": p.modality.float()}, "torch.float32"),
    "modality that is too large": (
        lambda p: {"modality": p.modality.index_fill(0, torch.tensor([5]), 4)},
        "modality holds 4 at token 5",
    ),
    "modality that is negative": (
        lambda p: {"modality": p.modality.index_fill(0, torch.tensor([5]), -1)},
        "modality holds -1 at token 5",
    ),
    "ends that stop short": (lambda p: {"cu_seqlens": p.cu_seqlens[:-1]}, "does not cover"),
    "ends that go too far": (lambda p: {"cu_seqlens": [0, 40, 76]}, "end at 75"),
    "ends that start late": (lambda p: {"cu_seqlens": p.cu_seqlens[1:]}, "start at 0"),
    "ends that fall": (lambda p: {"cu_seqlens": [0, 50, 40, 75]}, "never fall"),
    "no ends": (lambda p: {"cu_seqlens": []}, "does not cover"),
    "ends that are no whole numbers": (
        lambda p: {"cu_seqlens": [0, 40.5, 75]},
        "cu_seqlens=.* holds 40.5: expected a series of integers",
    ),
    "ends that are truth values": (lambda p: {"cu_seqlens": [False, 75]}, "holds False"),
    "ends that are one number": (lambda p: {"cu_seqlens": 75}, "of type int"),
    "ends without data": (lambda p: {"cu_seqlens": p.cu_seqlens.to("meta")}, "on meta"),
    "x on another device": (lambda p: {"x": p.x.to("meta")}, "x is on meta: expected cpu"),
    "time on another device": (
        lambda p: {"time_tokens": p.time_tokens.to("meta")},
        "time_tokens is on meta: expected cpu",
    ),
    "coords on another device": (lambda p: {"coords": p.coords.to("meta")}, "coords is on meta"),
    "modality on another device": (
        lambda p: {"modality": p.modality.to("meta")},
        "modality is on meta",
    ),
    "x that is no tensor": (lambda p: {"x": p.x.tolist()}, "x is of type list"),
    "coords that are no tensor": (lambda p: {"coords": None}, "coords is of type NoneType"),
    "modality that is no tensor": (
        lambda p: {"modality": p.modality.tolist()},
        "modality is of type list",
    ),
    "splits that are one number": (lambda p: {"split_sizes": 75}, "of type int"),
    "splits that are text": (lambda p: {"split_sizes": "75"}, "of type str"),
    "ends of another dtype": (lambda p: {"cu_seqlens": p.cu_seqlens.float()}, "cu_seqlens is"),
    "ends of another rank": (lambda p: {"cu_seqlens": p.cu_seqlens[None]}, "cu_seqlens is"),
    "too many splits": (lambda p: {"split_sizes": [75, 0]}, "expected 1 integers"),
    "no splits": (lambda p: {"split_sizes": []}, "expected 1 integers"),
    "splits that do not add up": (lambda p: {"split_sizes": [74]}, "add up to 74"),
    "a negative split": (lambda p: {"split_sizes": [-75]}, "zero or more"),
    "a split that is no integer": (lambda p: {"split_sizes": [75.0]}, "holds 75.0"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_refuses_bad_input(model, packed, case):
    change, message = BAD_INPUT[case]
    arguments = {**vars(packed), **change(packed)}
    with pytest.raises(ValueError, match=message), torch.no_grad():
        model(**arguments)


def test_sizes_may_be_numbers_of_numpy_or_torch(model, packed):
    with torch.no_grad():
        expected = model(*packed)
        packed.cu_seqlens = packed.cu_seqlens.numpy()
        assert torch.equal(model(*packed, split_sizes=torch.tensor([75])), expected)
        assert torch.equal(model(*packed, split_sizes=[packed.cu_seqlens[-1]]), expected)


ORDER = {
    "permutation": torch.tensor([1, 2, 0]),
    "inverse": torch.tensor([2, 0, 1]),
    "group_sizes": (1, 1, 1),
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"permutation": torch.tensor([1, 1, 0])}, "not a permutation"),
        ({"permutation": torch.tensor([1, 2, 3])}, "not a permutation"),
        ({"permutation": torch.tensor([1, 2, -3])}, "not a permutation"),
        ({"inverse": torch.tensor([1, 2, 0])}, "not a permutation"),
        ({"permutation": torch.tensor([1, 2, 0, 3])}, r"permutation is \(4,\)"),
        ({"inverse": torch.tensor([2, 0, 1]).int()}, r"inverse is \(3,\) torch.int32"),
        ({"group_sizes": (1, 1, 2)}, r"expected \(4,\)"),
        ({"group_sizes": (1, 3, -1)}, "zero or more"),
        ({"group_sizes": (1, 2)}, "expected 3 of zero or more"),
        ({"group_sizes": (1.0, 1, 1)}, "holds 1.0"),
    ],
)
def test_refuses_a_mapping_that_is_none(change, message):
    ModalityOrder(**ORDER)
    with pytest.raises(ValueError, match=message):
        ModalityOrder(**{**ORDER, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sequence": (74,)}, "sequence gives this rank 74 tokens and order 75"),
        ({"experts": (76,)}, "experts gives this rank 76 tokens"),
        ({"branches": (74,)}, "branches gives this branch 74 tokens"),
        ({"cu_seqlens": (0, 74)}, "does not cover"),
        ({"cu_seqlens": (0, 80, 75)}, "never fall"),
        ({"rotary": torch.zeros(74, 12)}, "rotary is"),
        ({"rotary": torch.zeros(75, 11)}, "rotary is"),
    ],
)
def test_refuses_a_plan_that_contradicts_itself(model, packed, change, message):
    plan = model.plan(packed.coords, packed.modality, packed.cu_seqlens)
    ((name, value),) = change.items()
    if name in ("sequence", "experts", "branches"):
        value = SequenceDispatcher(split_sizes=value)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(plan, **{name: value})


def test_refuses_the_plan_of_another_model(model, packed):
    other = Magi2Transformer(presets.tiny(torch.float32))
    plan = other.plan(packed.coords, packed.modality, packed.cu_seqlens)
    with pytest.raises(ValueError, match="rotary table has 24 columns: expected 12"):
        model.run(packed.x, plan, packed.time_tokens)


def test_no_tokens_give_no_velocities(model):
    packed = [
        torch.zeros(0, 24),
        torch.zeros(0, 9),
        torch.zeros(0, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(0, 16),
    ]
    with torch.no_grad():
        assert model(*packed).shape == (0, 8)


def test_modality_order_is_stable():
    order = ModalityOrder.from_modality(torch.tensor([2, 0, 1, 0, 2, 3]))
    assert order.permutation.tolist() == [1, 3, 2, 0, 4, 5]
    assert order.group_sizes == (2, 1, 3)
