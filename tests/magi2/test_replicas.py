"""Experts that several runs of ranks hold, reached over all ranks: the same values as in a run."""

from __future__ import annotations

import dataclasses
import types
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from magi2 import presets
from magi2.modules.experts import RoutedExperts, run_on_head_owners
from magi2.modules.replicas import (
    ReplicaDispatcher,
    expert_dispatcher,
    part_sizes,
    run_totals,
)
from magi2.modules.sequence import SequenceDispatcher
from magi2.options import Options, replicated_exchange_by_default
from magi2.topology import Topology
from magi2.transformer import Magi2Transformer
from tests.magi2.golden import rms_error
from tests.magi2.packed import packed_pair, without_padding
from tests.magi2.sharded import (
    SHARDED_RMS,
    all_experts,
    check_sharded,
    model_of,
    velocities,
    whole_state_dict,
)
from ulysses_comm import LONE_RANK
from ulysses_comm.simulate import simulate, simulate_world

ON, OFF = (Options(replicated_expert_exchange=flag) for flag in (True, False))
TINY = presets.tiny(torch.float32)

# Tokens of each rank, runs, and the parts of each rank by hand.
PARTS = [
    ((4, 4, 4, 4), 2, ((2, 2),) * 4),
    ((5, 3, 3, 3), 2, ((2, 3), (2, 1), (2, 1), (2, 1))),
    ((3, 0, 1, 6), 2, ((0, 3), (0, 0), (0, 1), (3, 3))),
    ((7, 6, 6, 5), 2, ((4, 3), (3, 3), (3, 3), (3, 2))),
    ((7, 6, 5, 6), 2, ((4, 3), (3, 3), (3, 2), (3, 3))),
    ((1, 1, 1, 1), 2, ((0, 1), (0, 1), (1, 0), (1, 0))),
    ((0, 0, 0, 0), 2, ((0, 0),) * 4),
    ((3702,) * 8, 2, ((1851, 1851),) * 8),
    ((3702,) * 8, 1, ((3702,),) * 8),
    ((7, 6, 6, 7), 2, ((3, 4), (3, 3), (3, 3), (4, 3))),
    ((5, 5, 1, 1, 0, 0), 3, ((5, 0, 0), (3, 2, 0), (1, 0, 0), (1, 0, 0), (0, 0, 0), (0, 0, 0))),
]
SPLITS = [(4, 4, 4, 4), (5, 3, 3, 3), (3, 0, 1, 6), (1, 1, 1, 1), (0, 0, 0, 0)]


@pytest.mark.parametrize(("splits", "num_runs", "expected"), PARTS)
def test_parts_add_up_to_each_rank_and_to_each_run(splits, num_runs, expected):
    parts = part_sizes(splits, num_runs)
    assert tuple(sum(own) for own in parts) == splits
    assert [sum(column) for column in zip(*parts, strict=True)] == run_totals(splits, num_runs)
    assert min(min(own) for own in parts) >= 0
    assert parts == expected


@pytest.mark.parametrize(
    ("splits", "num_runs", "message"),
    [
        ((4, 4, 4), 2, "num_runs=2 for the 3 ranks .* a number that divides 3"),
        ((4, 4), 0, "num_runs=0 for the 2 ranks"),
        ((4, 4), -1, "num_runs=-1 for the 2 ranks"),
        ((4, 4), True, r"num_runs=\[True\] holds True"),
        ((4, 4), 2.0, r"num_runs=\[2.0\] holds 2.0"),
        ((4, -1), 2, "expected integers of zero or more"),
        ((4, 1.5), 2, "holds 1.5: expected a series of integers"),
        ((4, True), 2, "holds True: expected a series of integers"),
        ((), 1, "expected integers of zero or more"),
    ],
)
def test_refuses_sizes_that_are_no_equal_runs(splits, num_runs, message):
    with pytest.raises(ValueError, match=message):
        part_sizes(splits, num_runs)


@pytest.mark.parametrize(
    ("splits", "num_runs", "message"),
    [
        ((4, 4), 2, "expected 4 integers of zero or more"),
        ((4,) * 4, 4, "runs of one rank: expected two ranks or more"),
        ((4,) * 4, 3, "a number that divides 4"),
        ((4, 4, 4, -4), 2, "zero or more"),
    ],
)
def test_refuses_a_group_that_is_not_made_of_runs(splits, num_runs, message):
    def step(group):
        with pytest.raises(ValueError, match=message):
            ReplicaDispatcher(group=group, split_sizes=splits, num_runs=num_runs)

    assert len(simulate(4, step).traffic) == 0
    with pytest.raises(ValueError, match="runs of one rank"):
        ReplicaDispatcher(group=LONE_RANK, split_sizes=(4,), num_runs=1)


class HeadNumber(torch.nn.Module):
    """Stands in for experts: exact arithmetic that depends on the row and its head alone."""

    def __init__(self, heads: range) -> None:
        super().__init__()
        self.num_heads = len(heads)
        self.heads = torch.tensor(list(heads))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 + self.heads.to(x.dtype)[:, None]


def mesh_topology(expert_size: int) -> Topology:
    """Of this rank, with experts over runs of the whole world."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("sequence",))
    return Topology.of_mesh(mesh, expert_size=expert_size)


def dispatchers(splits, num_runs=2):
    """This rank's topology, and its two ways to the experts, in a simulated world."""
    topology = mesh_topology(expert_size=len(splits) // num_runs)
    group = topology.sequence_group
    inside = SequenceDispatcher(
        group=topology.expert_group,
        split_sizes=tuple(splits[rank] for rank in topology.expert_ranks),
    )
    across = ReplicaDispatcher(group=group, split_sizes=tuple(splits), num_runs=num_runs)
    return topology, SequenceDispatcher(group=group, split_sizes=tuple(splits)), inside, across


@pytest.mark.parametrize(
    ("splits", "num_runs"),
    [(s, 2) for s in SPLITS] + [((3, 1, 2, 2, 4, 0, 1, 1), 2), ((5, 5, 1, 1, 0, 0), 3)],
    ids=str,
)
@pytest.mark.parametrize("num_heads", [12, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.int16])
def test_rows_meet_their_heads_and_come_back_bit_for_bit(splits, num_runs, num_heads, dtype):
    generator = torch.Generator().manual_seed(1)
    shape = (sum(splits), num_heads, 3)
    whole = torch.randint(-50, 50, shape, generator=generator).to(dtype)

    def program():
        topology, sequence, inside, across = dispatchers(splits, num_runs)
        experts = HeadNumber(topology.local_heads(num_heads))
        rows = sequence.shard(whole).mT.contiguous().mT
        return [run_on_head_owners(rows, experts, way) for way in (inside, across)]

    results = simulate_world(len(splits), program).results
    expected = HeadNumber(range(num_heads))(whole)
    for way in zip(*results, strict=True):
        assert torch.equal(torch.cat(way).view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("splits", SPLITS, ids=str)
def test_an_owner_has_its_part_of_every_rank_in_rank_order(splits):
    numbers = torch.arange(sum(splits)).view(-1, 1, 1) * 10 + torch.arange(4).view(1, -1, 1)
    parts = part_sizes(splits, 2)

    def program():
        _, sequence, inside, across = dispatchers(splits)
        (mine,) = across.scatter_heads([sequence.shard(numbers)])
        return mine, inside.seqlen, across.rank, across.world_size, across.seqlen_local

    for rank, (mine, tokens, place, run_size, local) in enumerate(
        simulate_world(4, program).results
    ):
        expected = []
        for source, own in enumerate(parts):
            start = sum(splits[:source]) + sum(own[: rank // 2])
            expected += range(start, start + own[rank // 2])
        assert mine[:, 0, 0].tolist() == [number * 10 + rank % 2 * 2 for number in expected]
        assert (mine[:, 1] - mine[:, 0]).eq(1).all()
        assert len(mine) == tokens  # as many rows as inside the run
        assert (place, run_size, local) == (rank % 2, 2, splits[rank])


def test_one_collective_each_way_and_no_other():
    x = torch.zeros(16, 4, 8)

    def program():
        _, sequence, _, across = dispatchers((4, 4, 4, 4))
        rows = sequence.shard(x)
        across.gather_heads(*across.scatter_heads([rows]))

    there, back = simulate_world(4, program).traffic
    row_bytes = 2 * 8 * 4
    for record in (there, back):
        assert record.kind == "all_to_all_single"
        assert record.sent == [[2 * row_bytes] * 4] * 4
    assert there.copied_bytes == back.copied_bytes == 4 * 4 * 2 * row_bytes


class RowByRow(torch.nn.Module):
    """Real experts, given one row at a time: no matrix product sees another row."""

    def __init__(self, experts: RoutedExperts) -> None:
        super().__init__()
        self.experts, self.num_heads = experts, experts.num_heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:0], *(self.experts(row) for row in x.split(1))])


def routed_experts(config, heads: range) -> RoutedExperts:
    """The usual random weights of a mixture for some of its heads."""
    layer = config.moe.layers[0]
    prefix = f"block.layers.{layer}.mlp.moe_mlp."
    experts = RoutedExperts(config, Options(), len(heads), None)
    count = config.moe.num_experts
    rows = slice(heads.start * count, heads.stop * count)
    whole = whole_state_dict(config)
    names = experts.state_dict().keys()
    experts.load_state_dict({name: whole[prefix + name][rows] for name in names})
    return experts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "splits", [(6, 6, 6, 6), (7, 6, 5, 6), (7, 6, 6, 5), (3, 0, 1, 6), (1, 0, 0, 1)], ids=str
)
def test_real_experts_give_the_values_of_the_exchange_inside_the_run(dtype, splits):
    # All experts chosen: no tie that a rounding could turn.
    config = all_experts(presets.tiny(dtype))
    whole = torch.randn(sum(splits), config.moe.num_heads, config.moe_head_dim).to(dtype)

    def program():
        topology, sequence, inside, across = dispatchers(splits)
        experts = routed_experts(config, topology.local_heads(config.moe.num_heads))
        rows = sequence.shard(whole)
        with torch.no_grad():
            return [
                run_on_head_owners(rows, form, way)
                for form in (RowByRow(experts), experts)
                for way in (inside, across)
            ]

    single = [torch.cat(outs) for outs in zip(*simulate_world(4, program).results, strict=True)]
    row_inside, row_across, inside, across = single
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(row_across.view(bits), row_inside.view(bits))
    # A library's matrix product may add in another order for another number of rows.
    assert rms_error(across, inside) <= SHARDED_RMS[dtype]
    assert inside.float().abs().max() > 0


def test_gradients_of_rows_equal_those_inside_the_run():
    splits = (3, 1, 2, 2)
    whole = torch.randn(8, 5, 4)
    weights = torch.randn(8, 5, 4)

    def program():
        topology, sequence, inside, across = dispatchers(splits)
        grads = []
        for way in (inside, across):
            rows = sequence.shard(whole).clone().requires_grad_()
            out = run_on_head_owners(rows, HeadNumber(topology.local_heads(5)), way)
            (out * sequence.shard(weights)).sum().backward()
            grads.append(rows.grad)
        return grads

    for way in zip(*simulate_world(4, program).results, strict=True):
        assert torch.equal(torch.cat(way), 2 * weights)


@pytest.mark.parametrize(
    ("splits", "replicated"),
    [
        ((6, 6, 6, 6), True),
        ((7, 6, 6, 7), True),
        ((0, 0, 0, 0), True),
        ((7, 6, 5, 6), False),
        ((7, 6, 6, 5), False),
        ((3, 0, 1, 6), False),
    ],
    ids=str,
)
def test_unequal_runs_exchange_inside_the_run(splits, replicated):
    def program():
        topology, sequence, inside, across = dispatchers(splits)
        assert expert_dispatcher(sequence, topology, 1) == inside
        return expert_dispatcher(sequence, topology, 2) == (across if replicated else inside)

    assert simulate_world(4, program).results == [True] * 4


@pytest.mark.parametrize(
    ("expert_ranks", "runs"),
    [
        (lambda rank: range(rank // 4 * 4, rank // 4 * 4 + 4), 2),
        (lambda rank: range(rank // 2 * 2, rank // 2 * 2 + 2), 4),
        (lambda rank: range(8), 1),
        (lambda rank: [rank], 1),
        (lambda rank: range(rank % 2, 8, 2), 1),
        (lambda rank: range(rank // 4 * 4, rank // 4 * 4 + 4)[::-1], 1),
    ],
    ids=["fours", "twos", "whole", "alone", "strided", "reversed"],
)
def test_only_consecutive_runs_inside_the_sequence_are_replicas(expert_ranks, runs):
    found = []
    for rank in range(8):
        ranks = tuple(expert_ranks(rank))
        topology = Topology(
            sequence_group=dist.ProcessGroup(rank, 8),
            expert_group=dist.ProcessGroup(ranks.index(rank), len(ranks)),
            expert_ranks=ranks,
        )
        found.append(topology.expert_runs)
    assert found == [runs] * 8
    assert Topology().expert_runs == 1


def test_consecutive_ranks_that_leave_no_whole_runs_are_no_replicas():
    topology = Topology(
        sequence_group=dist.ProcessGroup(1, 8),
        expert_group=dist.ProcessGroup(0, 4),
        expert_ranks=(1, 2, 3, 4),
    )
    assert topology.expert_runs == 1


@pytest.mark.parametrize("ranks", [(4, 5, 6, 7), (1, 2, 3, 4)], ids=str)
def test_a_run_without_this_rank_in_its_place_is_refused(ranks):
    with pytest.raises(ValueError, match="on sequence rank 0, which is member 0"):
        Topology(
            sequence_group=dist.ProcessGroup(0, 8),
            expert_group=dist.ProcessGroup(0, 4),
            expert_ranks=ranks,
        )


def test_the_option_is_decided_at_construction():
    def program():
        topologies = [mesh_topology(size) for size in (1, 2, 4)]
        return [
            [
                Magi2Transformer(TINY, options, topology, device="meta").expert_runs
                for topology in topologies
            ]
            for options in (ON, OFF, None)
        ]

    assert simulate_world(4, program).results == [[[1, 2, 1], [1, 1, 1], [1, 1, 1]]] * 4
    assert Magi2Transformer(TINY, ON, device="meta").expert_runs == 1


def test_only_musa_exchanges_over_replicas_when_nobody_says(monkeypatch):
    assert not replicated_exchange_by_default("cpu")
    assert not replicated_exchange_by_default("cuda")
    musa = types.SimpleNamespace(type="musa")
    monkeypatch.setattr(torch, "get_default_device", lambda: musa)
    assert replicated_exchange_by_default(None)
    with pytest.raises(ValueError, match="replicated_expert_exchange=1: expected True, False or"):
        Options(replicated_expert_exchange=1)  # type: ignore[arg-type]


def models(config, packed, expert_size, options, splits):
    def program():
        return velocities(config, packed, mesh_topology(expert_size), options, splits)

    return simulate_world(8, program)


@pytest.mark.parametrize("expert_size", [2, 4])
def test_eight_ranks_with_replicas_equal_one_rank(expert_size):
    # Twelve heads as released; four ranks of experts have three each.
    moe = dataclasses.replace(TINY.moe, num_heads=12, split_merge_size=192)
    config = dataclasses.replace(TINY, moe=moe)
    packed = without_padding(packed_pair(config))
    splits = {4: [20, 1, 0, 15, 0, 4, 20, 12], 2: [9, 9, 18, 0, 0, 18, 17, 1]}[expert_size]
    inside, across = (models(config, packed, expert_size, o, splits) for o in (OFF, ON))
    check_sharded(across.results, velocities(config, packed), torch.float32)
    assert rms_error(across.results[0], inside.results[0]) <= SHARDED_RMS[torch.float32]
    # The experts' exchanges have changed groups; there are no others than before.
    mixtures = 2 * len(config.moe.layers)
    runs = 8 // expert_size
    sizes = [Counter(len(record.ranks) for record in s.traffic) for s in (inside, across)]
    assert sizes[0] == sizes[1] + Counter({expert_size: mixtures * runs, 8: -mixtures})
    assert set(sizes[1]) == {8}
    assert {record.kind for record in across.traffic} == {"all_to_all_single"}


def test_a_model_with_unequal_runs_exchanges_inside_them_and_keeps_every_bit():
    packed = without_padding(packed_pair(TINY))
    inside, across = (models(TINY, packed, 4, o, [20, 1, 0, 30, 0, 4, 17, 0]) for o in (OFF, ON))
    assert torch.equal(across.results[0], inside.results[0])
    assert [record.sent for record in across.traffic] == [r.sent for r in inside.traffic]


def test_a_plan_of_other_runs_is_refused_on_every_rank():
    packed = without_padding(packed_pair(TINY))
    rows = (packed.coords, packed.modality, packed.cu_seqlens)

    def program():
        topology = mesh_topology(2)
        rank = topology.sequence_rank
        members = [rank % 2, rank % 2 + 2]
        strided = Topology(
            sequence_group=topology.sequence_group,
            expert_group=dist.new_group(members, use_local_synchronization=True),
            expert_ranks=tuple(members),
        )
        plan = model_of(TINY, topology, ON).plan(*rows)
        assert isinstance(plan.experts, ReplicaDispatcher)
        with pytest.raises(ValueError, match="expected a plan of this model"):
            model_of(TINY, strided, ON).run(packed.x, plan, packed.time_tokens)

    traffic = simulate_world(4, program).traffic
    assert not [record for record in traffic if "all_to_all" in record.kind]
