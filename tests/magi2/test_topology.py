from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from magi2.topology import Topology
from tests.ranks import run_ranks
from ulysses_comm import LONE_RANK
from ulysses_comm.simulate import simulate, simulate_world


def mesh_of(shape, names):
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def on_ranks(world_size, program):
    return simulate_world(world_size, program).results


def test_a_lone_rank_holds_everything():
    topology = Topology()
    assert (topology.sequence_size, topology.expert_size, topology.cfg_size) == (1, 1, 1)
    assert topology.local_heads(12) == range(12)


def test_a_lone_rank_stays_alone_in_a_running_world():
    sizes = on_ranks(2, lambda: Topology().sequence_size)
    assert sizes == [1, 1]


@pytest.mark.parametrize("shard_experts", [True, False])
def test_one_group_shares_the_experts_or_not(shard_experts):
    def step(group):
        return Topology.of_group(group, shard_experts=shard_experts).local_heads(12)

    heads = simulate(4, step).results
    runs = [range(0, 3), range(3, 6), range(6, 9), range(9, 12)]
    assert heads == (runs if shard_experts else [range(12)] * 4)


def test_heads_over_eight_ranks_leave_two_without():
    heads = simulate(8, lambda group: Topology.of_group(group).local_heads(12)).results
    assert [len(run) for run in heads] == [2, 2, 2, 2, 2, 2, 0, 0]


def test_expert_groups_are_runs_inside_the_sequence_groups():
    def program():
        topology = Topology.of_mesh(mesh_of((2, 4), ("cfg", "sequence")), cfg="cfg", expert_size=2)
        members = dist.get_process_group_ranks(topology.expert_group)
        return members, topology.expert_ranks, topology.cfg_rank, topology.sequence_rank

    results = on_ranks(8, program)
    assert [members for members, *_ in results] == [
        [rank // 2 * 2, rank // 2 * 2 + 1] for rank in range(8)
    ]
    assert [ranks for _, ranks, *_ in results] == [(0, 1), (0, 1), (2, 3), (2, 3)] * 2
    assert [cfg for *_, cfg, _ in results] == [0] * 4 + [1] * 4
    assert [rank for *_, rank in results] == [0, 1, 2, 3] * 2


def test_a_sequence_axis_that_is_not_the_last_gives_strided_groups():
    def program():
        topology = Topology.of_mesh(mesh_of((4, 2), ("sequence", "cfg")), cfg="cfg", expert_size=2)
        return (
            dist.get_process_group_ranks(topology.sequence_group),
            dist.get_process_group_ranks(topology.expert_group),
        )

    results = on_ranks(8, program)
    assert results[0] == ([0, 2, 4, 6], [0, 2])
    assert results[7] == ([1, 3, 5, 7], [5, 7])


def test_experts_on_every_rank_or_on_the_whole_axis_need_no_further_groups():
    def program():
        mesh = mesh_of((4,), ("sequence",))
        whole = Topology.of_mesh(mesh)
        every = Topology.of_mesh(mesh, expert_size=1)
        return whole.expert_group is whole.sequence_group, every.expert_group is LONE_RANK

    assert on_ranks(4, program) == [(True, True)] * 4


def test_three_expert_ranks_of_eight_are_refused_with_the_usable_sizes():
    def program():
        with pytest.raises(ValueError, match=r"Use one of \[1, 2, 4, 8\]"):
            Topology.of_mesh(mesh_of((8,), ("sequence",)), expert_size=3)

    on_ranks(8, program)


def test_twelve_heads_on_eight_ranks_take_four_expert_ranks_unless_told():
    def program():
        mesh = mesh_of((8,), ("sequence",))
        topology = Topology.of_mesh(mesh, num_expert_heads=12)
        whole = Topology.of_mesh(mesh, num_expert_heads=12, expert_size=8)
        return topology.expert_size, topology.local_heads(12), len(whole.local_heads(12))

    results = on_ranks(8, program)
    runs = [range(0, 3), range(3, 6), range(6, 9), range(9, 12)]
    assert [result[:2] for result in results] == [(4, run) for run in runs * 2]
    assert [result[2] for result in results] == [2, 2, 2, 2, 2, 2, 0, 0]


def expert_sums_of_replicas(shape):
    """Experts inside one replica of several: its group, and what an exchange over it brings."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "sequence"))
    topology = Topology.of_mesh(mesh["sequence"], expert_size=2)
    received = torch.zeros(2)
    dist.all_to_all_single(
        received, torch.full((2,), float(dist.get_rank())), group=topology.expert_group
    )
    return topology.expert_ranks, received.tolist()


EXPECTED_SUMS = [
    ((rank % 4 // 2 * 2, rank % 4 // 2 * 2 + 1), [rank // 2 * 2.0, rank // 2 * 2.0 + 1])
    for rank in range(8)
]


def test_replicas_make_their_expert_groups_apart():
    assert on_ranks(8, lambda: expert_sums_of_replicas((2, 4))) == EXPECTED_SUMS


def sums_on_real_ranks(group):
    return expert_sums_of_replicas((2, 4))


@pytest.mark.gloo
def test_replicas_of_real_ranks_make_their_expert_groups_apart():
    # Every rank making only its replica's groups, each under the world's next number, hangs here.
    assert run_ranks(sums_on_real_ranks, 8) == EXPECTED_SUMS


def test_a_mesh_in_another_order_keeps_the_order_of_its_groups():
    def program():
        mesh = DeviceMesh("cpu", torch.tensor([0, 2, 1, 3]), mesh_dim_names=("sequence",))
        topology = Topology.of_mesh(mesh, expert_size=2)
        members = dist.get_process_group_ranks(topology.sequence_group)
        experts = dist.get_process_group_ranks(topology.expert_group)
        return experts == [members[rank] for rank in topology.expert_ranks]

    assert on_ranks(4, program) == [True] * 4


@pytest.mark.parametrize(
    ("shape", "names", "kwargs", "message"),
    [
        ((4,), ("x",), {}, "expected .'sequence',"),
        ((2, 2), ("data", "sequence"), {}, "give data-parallel replicas meshes of their own"),
        ((2, 2), ("cfg", "sequence"), {}, "expected .'sequence',"),
        ((4,), ("sequence",), {"cfg": "cfg"}, "expected .'cfg', 'sequence'."),
        (
            (4,),
            ("sequence",),
            {"expert_size": 3},
            r"expert_size=3 does not divide the 4 ranks .* Use one of \[1, 2, 4\]",
        ),
        ((4,), ("sequence",), {"expert_size": 0}, "expert_size=0 does not divide"),
        ((4,), ("sequence",), {"expert_size": True}, "expert_size=True does not divide"),
        ((4,), ("sequence",), {"expert_size": "2"}, "expert_size='2' does not divide"),
        ((4,), ("sequence",), {"expert_size": 8}, "expert_size=8 does not divide the 4 ranks"),
        ((4, 1), ("cfg", "sequence"), {"cfg": "cfg"}, "axis 'cfg' has 4 ranks: expected 2"),
    ],
)
def test_refuses_a_mesh_that_does_not_fit_on_every_rank(shape, names, kwargs, message):
    def program():
        with pytest.raises(ValueError, match=message):
            Topology.of_mesh(mesh_of(shape, names), **kwargs)

    on_ranks(4, program)


@pytest.mark.parametrize(
    ("expert_ranks", "message"),
    [((0,), "for an expert group of 2"), ((0, 4), "from 0 to 1"), ((1, 1), "distinct ranks")],
)
def test_refuses_expert_ranks_outside_the_sequence_group(expert_ranks, message):
    def step(group):
        with pytest.raises(ValueError, match=message):
            Topology(sequence_group=group, expert_group=group, expert_ranks=expert_ranks)

    simulate(2, step)
