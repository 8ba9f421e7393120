"""Several ranks against one: attention over shared tokens, experts over shared heads, branches."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from magi2 import presets
from magi2.initialise import initialise
from magi2.modules.experts import run_on_head_owners
from magi2.modules.sequence import SequenceDispatcher
from magi2.options import Options
from magi2.topology import Topology
from magi2.transformer import Magi2Transformer
from tests.magi2.packed import Packed, packed_pair
from tests.magi2.sharded import (
    LAYOUTS,
    UNTIED_RMS,
    all_experts,
    check_sharded,
    on_mesh,
    velocities,
)
from ulysses_comm.simulate import simulate, simulate_world

DTYPES = [torch.float32, torch.bfloat16]
TOKENS = 75

# Even, uneven, ranks without tokens, all tokens on one rank.
SPLITS = {
    2: [None, [40, 35], [0, 75], [74, 1]],
    3: [None, [75, 0, 0]],
    4: [None, [30, 0, 45, 0], [0, 0, 0, 75]],
    6: [None, [1, 70, 0, 2, 1, 1]],
    8: [None, [20, 1, 0, 30, 0, 4, 20, 0], [0, 0, 0, 75, 0, 0, 0, 0]],
}
CASES = [
    (preset, world_size, splits)
    for preset, sizes in ((presets.tiny, (2, 4, 8)), (presets.tiny_uneven, (2, 3, 6)))
    for world_size in sizes
    for splits in SPLITS[world_size]
]


@functools.cache
def request_of(preset, dtype) -> Packed:
    packed = packed_pair(preset(dtype))
    assert len(packed.x) == TOKENS
    return packed


@functools.cache
def alone(preset, dtype) -> torch.Tensor:
    return velocities(preset(dtype), request_of(preset, dtype))


def pair_of(packed: Packed) -> Packed:
    """The conditional and the unconditional sequence, without the padding behind them."""
    end = int(packed.cu_seqlens[-2])
    cut = {name: value[:end] for name, value in vars(packed).items() if name != "cu_seqlens"}
    return dataclasses.replace(packed, **cut, cu_seqlens=packed.cu_seqlens[:-1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("preset", "world_size", "splits"), CASES)
def test_sharded_model_equals_one_rank_in_every_layout(preset, world_size, splits, dtype):
    config, packed = preset(dtype), request_of(preset, dtype)
    by_layout = {
        name: simulate(
            world_size,
            lambda group, options=options: velocities(
                config, packed, Topology.of_group(group), options, splits
            ),
        ).results
        for name, options in LAYOUTS.items()
    }
    for name, results in by_layout.items():
        check_sharded(results, alone(preset, dtype), dtype)
        assert torch.equal(results[0], by_layout["packed"][0]), f"{name} has other bits"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_sharded_model_equals_one_rank_on_a_gpu(world_size, dtype):
    config, packed = all_experts(presets.tiny(dtype)), request_of(presets.tiny, dtype)
    expected = velocities(config, packed, device="cuda")
    for splits in SPLITS[world_size]:
        by_layout = [
            simulate(
                world_size,
                lambda group, options=options, splits=splits: velocities(
                    config, packed, Topology.of_group(group), options, splits, "cuda"
                ),
            ).results
            for options in LAYOUTS.values()
        ]
        for results in by_layout:
            check_sharded(results, expected, dtype, UNTIED_RMS)
            assert torch.equal(results[0], by_layout[0][0])


@pytest.mark.parametrize("heads", [2, 4])
def test_grouped_queries_are_sharded_with_their_keys(heads):
    config = dataclasses.replace(presets.tiny(torch.float32), num_kv_heads=heads)
    packed = packed_pair(config)
    results = simulate(2, lambda group: velocities(config, packed, Topology.of_group(group)))
    check_sharded(results.results, velocities(config, packed), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("expert_size", [1, 2, 4, 8])
def test_experts_over_part_of_the_ranks_equal_one_rank(expert_size, dtype):
    config, packed = presets.tiny(dtype), request_of(presets.tiny, dtype)
    splits = [20, 1, 0, 30, 0, 4, 20, 0]
    results = simulate_world(
        8, lambda: on_mesh(config, packed, expert_size=expert_size, split_sizes=splits)
    )
    check_sharded(results.results, alone(presets.tiny, dtype), dtype)


@pytest.mark.parametrize("heads", [12, 6])
def test_heads_that_the_ranks_do_not_divide_leave_some_without(heads):
    tiny = presets.tiny(torch.float32)
    moe = dataclasses.replace(tiny.moe, num_heads=heads, split_merge_size=16 * heads)
    config = dataclasses.replace(tiny, moe=moe)
    packed = packed_pair(config)
    simulation = simulate(
        8,
        lambda group: (
            velocities(config, packed, Topology.of_group(group)),
            Topology.of_group(group).local_heads(heads),
        ),
    )
    results, local = zip(*simulation.results, strict=True)
    check_sharded(results, velocities(config, packed), torch.float32)
    assert [head for run in local for head in run] == list(range(heads))
    assert len(local[7]) == 0


@pytest.mark.parametrize(
    ("world_size", "cfg_size", "expert_size"),
    [(2, 2, 1), (4, 2, 1), (4, 2, 2), (8, 2, 2), (8, 2, 4), (8, 1, 4)],
)
def test_branches_packed_or_on_their_own_ranks_equal_one_rank(world_size, cfg_size, expert_size):
    config = presets.tiny(torch.float32)
    packed = pair_of(request_of(presets.tiny, torch.float32))
    simulation = simulate_world(
        world_size,
        lambda: on_mesh(config, packed, cfg_size=cfg_size, expert_size=expert_size),
    )
    check_sharded(simulation.results, velocities(config, packed), torch.float32)


@pytest.mark.parametrize(("world_size", "splits"), [(2, None), (3, [75, 0, 0])])
@pytest.mark.parametrize("layout", ["packed", "flat"])
def test_gradients_of_all_ranks_add_up_to_those_of_one(world_size, splits, layout):
    config = presets.tiny_uneven(torch.float32)
    packed, weight = packed_pair(config), torch.randn(TOKENS, 8)

    def gradients(topology, splits):
        model = Magi2Transformer(config, LAYOUTS[layout], topology)
        initialise(model)
        # Every rank has the whole result, so every rank's loss counts.
        ((model(*packed, splits) * weight).sum() / topology.sequence_size).backward()
        return {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name, p in model.named_parameters()
        }

    expected = gradients(Topology(), None)
    ranks = simulate(world_size, lambda g: gradients(Topology.of_group(g), splits)).results
    for name, gradient in expected.items():
        parts = [rank[name] for rank in ranks]
        total = torch.cat(parts) if ".moe_mlp." in name else torch.stack(parts).sum(0)
        # Some gradients are small differences of large terms: hence the absolute part.
        assert (total - gradient).norm() <= 1e-5 * gradient.norm() + 1e-5, name


def test_layouts_say_what_they_send_and_copy():
    config, packed = presets.tiny(), request_of(presets.tiny, torch.bfloat16)
    traffic = {
        name: simulate(
            4,
            lambda group, options=options: velocities(
                config, packed, Topology.of_group(group, shard_experts=False), options
            ),
        ).traffic
        for name, options in LAYOUTS.items()
    }
    # Two exchanges a layer, and the gathering of the result.
    assert {len(records) for records in traffic.values()} == {2 * config.num_layers + 1}
    copied = {name: sum(t.copied_bytes) for name, t in traffic.items()}
    rows = TOKENS * config.hidden_size * 2 * config.num_layers
    # Packing is booked by nobody: it is the projection's own store.
    assert copied["flat"] - copied["packed in"] == 3 * rows
    assert copied["flat"] - copied["packed out"] == rows
    assert copied["flat"] - copied["packed"] == 4 * rows
    assert all(t.matrix == traffic["flat"].matrix for t in traffic.values())


def test_a_plan_needs_no_communication():
    packed = request_of(presets.tiny, torch.float32)

    def step(group):
        model = Magi2Transformer(presets.tiny(), topology=Topology.of_group(group), device="meta")
        model.pre_adapter.rope.bands = torch.ones(4)
        return model.plan(packed.coords, packed.modality, packed.cu_seqlens)

    simulation = simulate(4, step)
    assert len(simulation.traffic) == 0
    assert [sum(plan.order.group_sizes) for plan in simulation.results] == [19, 19, 19, 18]
    assert {plan.experts.split_sizes for plan in simulation.results} == {(19, 19, 19, 18)}


class HeadNumber(torch.nn.Module):
    """Stands in for experts: exact arithmetic that depends on the head and on nothing else."""

    def __init__(self, heads: range) -> None:
        super().__init__()
        self.num_heads = len(heads)
        self.heads = torch.tensor(list(heads)).float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 + self.heads[:, None]


@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
@pytest.mark.parametrize("splits", ["equal", "ramp", "zero", "empty"])
def test_every_head_meets_its_own_experts_bit_for_bit(world_size, splits):
    sizes = {
        "equal": [3] * world_size,
        "ramp": list(range(world_size)),
        "zero": [5] + [0] * (world_size - 1),
        "empty": [0] * world_size,
    }[splits]
    whole = torch.randn(sum(sizes), 12, 4).bfloat16().float()
    expected = whole * 2 + torch.arange(12.0)[:, None]

    def step(group):
        topology = Topology.of_group(group)
        dispatcher = SequenceDispatcher(group=group, split_sizes=tuple(sizes))
        experts = HeadNumber(topology.local_heads(12))
        return run_on_head_owners(dispatcher.shard(whole), experts, dispatcher)

    assert torch.equal(torch.cat(simulate(world_size, step).results), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"split_sizes": [75, 0, 0]}, "expected 2 integers of zero or more"),
        ({"split_sizes": [76, -1]}, "expected 2 integers of zero or more"),
        ({"split_sizes": [37, 37]}, "add up to 74: expected 75"),
        ({"cu_seqlens": [0, 74]}, "does not cover"),
        ({"modality": torch.full((75,), 4)}, "modality holds 4"),
        ({"x": torch.zeros(74, 24)}, "x is"),
    ],
)
def test_bad_input_is_refused_on_every_rank_before_anything_is_sent(change, message):
    config, packed = presets.tiny(), request_of(presets.tiny, torch.bfloat16)

    def step(group):
        model = Magi2Transformer(config, topology=Topology.of_group(group))
        with pytest.raises(ValueError, match=message):
            model(**{**vars(packed), **change})

    assert len(simulate(2, step).traffic) == 0


def test_ranks_must_divide_the_attention_heads():
    def step(group):
        with pytest.raises(
            ValueError,
            match=r"6 query and 6 key/value heads do not split over 4 .* one of \[1, 2, 3, 6\]",
        ):
            Magi2Transformer(
                presets.tiny_uneven(), topology=Topology.of_group(group), device="meta"
            )

    simulate(4, step)


def test_branches_need_as_many_sequences_each():
    config, packed = presets.tiny(), request_of(presets.tiny, torch.bfloat16)

    def program():
        with pytest.raises(ValueError, match="3 packed sequences do not divide among 2 branches"):
            on_mesh(config, packed, cfg_size=2)

    traffic = simulate_world(2, program).traffic
    assert not [record for record in traffic if "all_to_all" in record.kind]


def test_layouts_are_decided_at_construction():
    def step(group):
        topology = Topology.of_group(group)
        flags = []
        for options in (None, *LAYOUTS.values()):
            model = Magi2Transformer(presets.tiny(), options, topology, device="meta")
            attention = model.block.layers[0].attention
            flags.append((attention.qkv_head_shards, attention.output_head_shards))
        return flags

    both = [(True, True), (True, True), (False, False), (True, False), (False, True)]
    assert simulate(2, step).results == [both, both]
    # A lone rank has nothing to lay out, whatever it is asked.
    lone = Magi2Transformer(presets.tiny(), Options(qkv_head_shards=True), device="meta")
    assert not lone.block.layers[0].attention.qkv_head_shards
