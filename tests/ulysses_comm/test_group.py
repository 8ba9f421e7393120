"""What may be passed as `group`, and that None never silently means one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests import cases, reference
from tests.bits import assert_same_bits
from tests.cases import FP32
from tests.ranks import run_ranks
from tests.spy import SpyGroup
from tests.traffic import calls_of
from ulysses_comm import (
    LONE_RANK,
    scatter_heads_gather_seqlen,
    scatter_seqlen_gather_head_shards,
    scatter_seqlen_gather_heads,
    simulate,
    simulate_world,
)
from ulysses_comm.group import resolve_group

SPLITS = (3, 0, 4, 2)
HEADS = cases.of_one_dtype((2, 1), FP32)


def assert_exchanges(group: Any, splits: tuple[int, ...], rank: int, seed: int = 0) -> None:
    """Run both exchanges over `group`, whose rank `rank` we are, and check the bits."""
    inputs = cases.inputs_of_all(splits, HEADS, seed=seed)
    received = scatter_heads_gather_seqlen(inputs[rank], splits, group)
    expected = reference.scatter_heads_results(inputs, rank)
    for result, want in zip(received, expected, strict=True):
        assert_same_bits(result, want, f"rank {rank}")
    output = received[0].contiguous()
    assert_same_bits(scatter_seqlen_gather_heads(output, splits, group), inputs[rank][0])
    shards = scatter_seqlen_gather_head_shards(output, splits, group)
    assert_same_bits(shards.flatten(1, 2), inputs[rank][0])


def test_none_is_a_lone_rank_where_nothing_is_initialised() -> None:
    assert not dist.is_initialized()
    assert resolve_group(None) is None
    assert resolve_group(LONE_RANK) is None
    assert_exchanges(None, (5,), 0)
    assert_exchanges(LONE_RANK, (5,), 0)


def test_a_process_group_stands_for_itself() -> None:
    group = SpyGroup(1, 3)
    assert resolve_group(group) is group


def test_none_is_the_default_group_of_a_simulated_world() -> None:
    def program() -> None:
        assert resolve_group(None) is dist.group.WORLD
        assert_exchanges(None, SPLITS, dist.get_rank())

    simulation = simulate_world(4, program)
    assert len(calls_of(simulation)) == 3
    for call in calls_of(simulation):
        assert call.bytes_by_pair[0][2] > 0, "nothing moved between ranks"


def test_none_with_one_ranks_splits_is_refused_in_a_world_of_several() -> None:
    """Megatron-Bridge #2667: a missing group must not let each rank attend to its own slice."""

    def program() -> None:
        scatter_heads_gather_seqlen([torch.zeros(5, 4, 8)], [5], None)

    with pytest.raises(ValueError, match=r"split_sizes.*4 ranks"):
        simulate_world(4, program)


def test_a_lone_rank_is_asked_for_by_name_in_a_world_of_several() -> None:
    def program() -> None:
        assert resolve_group(LONE_RANK) is None
        assert_exchanges(LONE_RANK, (5,), 0)

    assert calls_of(simulate_world(4, program)) == []


def test_device_meshes_of_one_dimension_serve() -> None:
    def program() -> None:
        rank = dist.get_rank()
        assert_exchanges(init_device_mesh("cpu", (4,), mesh_dim_names=("sp",)), SPLITS, rank)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
        # Ranks (0, 1) and (2, 3) each share a sequence; another one per data-parallel rank.
        assert_exchanges(mesh["sp"], (4, 1), rank % 2, seed=rank // 2)
        assert_exchanges(mesh["dp"], (0, 2), rank // 2, seed=rank % 2)
        assert_exchanges(mesh.get_group("sp"), (4, 1), rank % 2, seed=rank // 2)

    simulate_world(4, program)


def test_a_mesh_of_two_dimensions_is_refused() -> None:
    def program() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
        with pytest.raises(ValueError, match=r"DeviceMesh.*2 dimensions.*expected\s+one"):
            scatter_heads_gather_seqlen([torch.zeros(5, 4, 8)], [5, 5], mesh)

    simulate_world(4, program)


def test_two_groups_alive_at_once_do_not_mix() -> None:
    def program() -> None:
        rank = dist.get_rank()
        pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        across = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
        for seed in range(3):
            assert_exchanges(pairs[rank // 2], (1, 4), rank % 2, seed=10 * (rank // 2) + seed)
            assert_exchanges(across[rank % 2], (2, 3), rank // 2, seed=10 * (rank % 2) + seed)
            assert_exchanges(None, SPLITS, rank, seed=seed)

    simulate_world(4, program)


def test_a_rank_outside_the_group_gets_an_error_at_once() -> None:
    def program() -> str:
        rank = dist.get_rank()
        group = dist.new_group([0, 1])
        if rank < 2:
            assert_exchanges(group, (2, 1), rank)
            return ""
        with pytest.raises(ValueError, match="not a member") as caught:
            scatter_heads_gather_seqlen([torch.zeros(1, 2, 8)], [2, 1], group)
        with pytest.raises(ValueError, match="not a member"):
            scatter_seqlen_gather_heads(torch.zeros(3, 2, 8), [2, 1], group)
        return str(caught.value)

    messages = simulate_world(4, program).results
    assert messages[2] == messages[3] != ""


def mesh_of_the_first_two_ranks() -> None:
    mesh = DeviceMesh("cpu", [0, 1])
    rank = dist.get_rank()
    if rank < 2:
        assert_exchanges(mesh, (2, 1), rank)
        return
    with pytest.raises(ValueError, match="not a member"):
        scatter_heads_gather_seqlen([torch.zeros(1, 2, 8)], [2, 1], mesh)


def test_a_rank_outside_the_mesh_gets_an_error_at_once() -> None:
    simulate_world(4, mesh_of_the_first_two_ranks)


@pytest.mark.parametrize(
    "group",
    [3, -100.5, "gloo", [0, 1], object(), torch.zeros(2)],
    ids=lambda group: type(group).__name__,
)
def test_anything_else_is_a_type_error_that_lists_what_serves(group: Any) -> None:
    with pytest.raises(TypeError, match=r"ProcessGroup.*DeviceMesh.*LONE_RANK.*None"):
        scatter_heads_gather_seqlen([torch.zeros(1, 2, 8)], [1], group)


def test_exchanges_make_no_groups_and_keep_no_state() -> None:
    def program() -> None:
        rank = dist.get_rank()
        before = dict(dist.distributed_c10d._world.pg_names)
        assert_exchanges(None, SPLITS, rank)
        assert dict(dist.distributed_c10d._world.pg_names) == before

    simulate_world(4, program)


def on_explicit_simulated_groups(group: dist.ProcessGroup) -> None:
    assert_exchanges(group, SPLITS, group.rank())


def test_explicit_groups_serve_without_an_initialised_world() -> None:
    simulate(4, on_explicit_simulated_groups)
    assert not dist.is_initialized()


def group_forms_on_gloo(group: dist.ProcessGroup) -> None:
    rank = dist.get_rank()
    assert_exchanges(group, SPLITS, rank)
    assert_exchanges(None, SPLITS, rank)
    assert_exchanges(LONE_RANK, (5,), 0, seed=rank)
    assert_exchanges(DeviceMesh("cpu", [0, 1, 2, 3]), SPLITS, rank)
    mesh_of_the_first_two_ranks()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
    assert_exchanges(mesh["sp"], (4, 1), rank % 2, seed=rank // 2)
    assert_exchanges(mesh["dp"], (0, 2), rank // 2, seed=rank % 2)
    reversed_group = dist.new_group([2, 0])
    if rank in (0, 2):
        assert_exchanges(reversed_group, (3, 1), dist.get_rank(reversed_group))
    else:
        with pytest.raises(ValueError, match="not a member"):
            scatter_heads_gather_seqlen([torch.zeros(1, 2, 8)], [2, 1], reversed_group)
    with pytest.raises(ValueError, match=r"split_sizes.*4 ranks"):
        scatter_heads_gather_seqlen([torch.zeros(5, 4, 8)], [5], None)
    with pytest.raises(ValueError, match="2 dimensions"):
        scatter_seqlen_gather_heads(torch.zeros(5, 4, 8), [5, 0], mesh)


@pytest.mark.gloo
def test_every_form_of_group_on_real_processes() -> None:
    run_ranks(group_forms_on_gloo, 4)
