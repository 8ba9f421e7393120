"""Checkpoints on several ranks: each reads its own rows, and together they write a whole one."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from magi2 import presets
from magi2.checkpoint import load_checkpoint, save_checkpoint, save_model
from magi2.checkpoint.index import INDEX_NAME, open_checkpoint
from magi2.checkpoint.shard_file import ShardFile
from magi2.initialise import initialise, random_state_dict
from magi2.topology import Topology
from magi2.transformer import Magi2Transformer
from tests.magi2.live_memory import resident_bytes
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


# Twelve heads, 2 MiB of each in each of six stacks: what the kernel maps around a page is little.
LARGE = dataclasses.replace(
    CONFIG,
    moe=dataclasses.replace(
        CONFIG.moe, num_heads=12, split_merge_size=12 * 32, expert_intermediate_size=4096
    ),
)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    folder = tmp_path_factory.mktemp("large") / "saved"
    save_checkpoint(random_state_dict(LARGE), LARGE, folder, max_shard_bytes=64 << 20)
    return folder


@pytest.mark.parametrize(("expert_size", "heads"), [(8, [2] * 6 + [0] * 2), (4, [3] * 8)])
def test_a_rank_reads_no_more_bytes_than_its_share(expert_size, heads, large, monkeypatch):
    kept, asked = [], []
    read = ShardFile.read

    def opened(folder):
        kept.append(open_checkpoint(folder))
        return kept[-1]

    def counted(self, name, rows=None):
        view = read(self, name, rows)
        asked.append(view.nbytes)
        return view

    monkeypatch.setattr("magi2.checkpoint.load.open_checkpoint", opened)
    monkeypatch.setattr(ShardFile, "read", counted)

    def program():
        mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("sequence",))
        topology = Topology.of_mesh(mesh, expert_size=expert_size)
        model = Magi2Transformer(LARGE, topology=topology, device="meta")
        load_checkpoint(model, large)
        touched = sum(resident_bytes(file.path) for file in kept[0].files.values())
        bytes_asked = sum(asked)
        kept.clear()
        asked.clear()
        share = {name: tensor.nbytes for name, tensor in model.state_dict().items()}
        experts = sum(n for name, n in share.items() if ".moe_mlp." in name)
        return bytes_asked, touched, sum(share.values()), experts

    results = simulate_world(8, program).results
    head_bytes = results[0][3] // heads[0]
    for (bytes_asked, touched, share, experts), num_heads in zip(results, heads, strict=True):
        assert bytes_asked == share
        # The kernel maps up to 2 MiB around a page: at both ends of the six slices, if any.
        assert touched <= share + ((6 * 4 if num_heads else 2) << 20)
        assert experts == num_heads * head_bytes


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


def test_ranks_leave_together_when_one_cannot_write(tmp_path):
    (tmp_path / "file").write_text("")

    def step(group):
        model = model_of(CONFIG, Topology.of_group(group))
        try:
            save_model(model, tmp_path / "file" / "folder", max_shard_bytes=2 << 20)
        except OSError as error:
            return type(error).__name__
        return "returned"

    assert simulate(4, step).results == ["NotADirectoryError"] + ["returned"] * 3


def test_saving_over_a_checkpoint_is_refused_on_every_writing_rank(saved):
    def step(group):
        model = Magi2Transformer(CONFIG, topology=Topology.of_group(group), device="meta")
        with pytest.raises(ValueError, match="already holds a checkpoint"):
            save_model(model, saved)

    assert len(simulate(2, step).traffic) == 0
