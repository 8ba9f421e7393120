"""Checkpoints on several ranks: each reads its own rows, and together they write a whole one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from magi2 import presets
from magi2.checkpoint import load_checkpoint, save_checkpoint, save_model
from magi2.checkpoint.index import INDEX_NAME
from magi2.checkpoint.shard_file import ShardFile
from magi2.initialise import initialise, random_state_dict
from magi2.topology import Topology
from magi2.transformer import Magi2Transformer
from tests.magi2.packed import packed_pair
from tests.magi2.sharded import check_sharded, model_of, velocities
from ulysses_comm.simulate import simulate, simulate_world

CONFIG = presets.tiny()
EXPERTS = "block.layers.1.mlp.moe_mlp.W_up"


@pytest.fixture(scope="module")
def weights():
    return random_state_dict(CONFIG)


@pytest.fixture(scope="module")
def saved(weights, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded") / "tiny"
    save_checkpoint(weights, CONFIG, folder, max_shard_bytes=2 << 20)
    return folder


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_ranks_load_their_heads_and_run_as_one(world_size, saved, weights):
    packed = packed_pair(CONFIG)

    def step(group):
        model = Magi2Transformer(CONFIG, topology=Topology.of_group(group), device="meta")
        load_checkpoint(model, saved)
        with torch.no_grad():
            return model.get_parameter(EXPERTS), model(*packed)

    experts, results = zip(*simulate(world_size, step).results, strict=True)
    assert torch.equal(torch.cat(experts), weights[EXPERTS])
    check_sharded(results, velocities(CONFIG, packed), CONFIG.dtype)


def test_a_rank_asks_for_no_rows_but_its_own(saved, monkeypatch):
    asked = []
    read = ShardFile.read

    def spy(self, name, rows=None):
        asked.append((name, rows))
        return read(self, name, rows)

    monkeypatch.setattr(ShardFile, "read", spy)

    def step(group):
        topology = Topology.of_group(group)
        load_checkpoint(Magi2Transformer(CONFIG, topology=topology, device="meta"), saved)
        rows = {rows for name, rows in asked if ".moe_mlp." in name}
        whole = {rows for name, rows in asked if ".moe_mlp." not in name}
        asked.clear()
        return rows, whole

    per_rank = simulate(8, step).results
    assert [rows for rows, _ in per_rank] == [
        {range(min(8 * rank, 32), min(8 * rank + 8, 32))} for rank in range(8)
    ]
    assert all(whole == {None} for _, whole in per_rank)


def test_initialising_sharded_ranks_gives_rows_of_one_whole(weights):
    def step(group):
        model = Magi2Transformer(CONFIG, topology=Topology.of_group(group))
        initialise(model)
        return model.get_parameter(EXPERTS).detach()

    assert torch.equal(torch.cat(simulate(2, step).results), weights[EXPERTS])


@pytest.mark.parametrize(("cfg_size", "expert_size"), [(1, 1), (1, 2), (1, 4), (2, 2), (1, 8)])
def test_ranks_write_a_whole_checkpoint(cfg_size, expert_size, weights, tmp_path):
    world_size = max(4, expert_size)

    def program():
        mesh = init_device_mesh(
            "cpu", (cfg_size, world_size // cfg_size), mesh_dim_names=("cfg", "sequence")
        )
        topology = Topology.of_mesh(mesh, cfg="cfg", expert_size=expert_size)
        save_model(model_of(CONFIG, topology), tmp_path / "saved", max_shard_bytes=2 << 20)
        dist.barrier()
        return (tmp_path / "saved" / INDEX_NAME).exists()

    assert all(simulate_world(world_size, program).results)
    model = Magi2Transformer(CONFIG, device="meta")
    load_checkpoint(model, tmp_path / "saved")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name]), name


def test_saving_over_a_checkpoint_is_refused_on_every_writing_rank(saved):
    def step(group):
        model = Magi2Transformer(CONFIG, topology=Topology.of_group(group), device="meta")
        with pytest.raises(ValueError, match="already holds a checkpoint"):
            save_model(model, saved)

    assert len(simulate(2, step).traffic) == 0
