"""Plans against the model's own shapes, the traffic record, and the released model's figures."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from magi2 import presets
from magi2.checkpoint import save_checkpoint
from magi2.checkpoint.index import open_checkpoint
from magi2.checkpoint.slices import is_sharded
from magi2.geometry import Geometry
from magi2.initialise import random_state_dict
from magi2.packing import plan_tokens
from magi2.planning import (
    DEVICES,
    DeviceProfile,
    RankLayout,
    branch_tokens,
    plan_step,
    weight_groups,
)
from magi2.planning.reading import plan_reading
from magi2.planning.traffic import plan_exchanges
from magi2.planning.work import plan_work
from magi2.timing.exchanges import BRANCHES, DISPATCH, OUTPUT, QKV, RESULT, RETURN
from magi2.topology import Topology
from magi2.transformer import Magi2Transformer
from tests.magi2.packed import packed_pair, without_padding
from tests.magi2.sharded import model_of
from ulysses_comm.simulate import simulate_world

GIB = 2**30
H200 = DEVICES["h200"]


@pytest.fixture(scope="module")
def preview():
    config = presets.preview()
    return config, weight_groups(config)


def released_tokens() -> tuple[int, int]:
    return branch_tokens(Geometry.of(width=448, height=256), (222, 222))


def test_released_example_has_3702_tokens_a_rank():
    assert released_tokens() == (14808, 14808)
    config = presets.preview()
    assert RankLayout.of(config, released_tokens(), ulysses=8).tokens_local == 3702
    split = RankLayout.of(config, (14601, 15015), ulysses=4, cfg=2)
    assert split.sequences == (15015,)
    assert split.tokens_local == 3754


@pytest.mark.parametrize(("image_size", "num_images"), [(None, 0), ((2, 4), 2)])
def test_branch_tokens_are_those_that_are_packed(image_size, num_images):
    geometry = Geometry.of(width=64, height=32, num_frames=9)
    images = {"image_size": image_size, "num_images": num_images}
    layout = plan_tokens(geometry, (7, 0), **images)
    first, second = branch_tokens(geometry, (7, 0), **images)
    assert layout.cu_seqlens == (0, first, first + second)


def test_released_model_has_its_documented_sizes(preview):
    config, groups = preview
    assert sum(group.tensors for group in groups) == 1371
    assert sum(group.elements for group in groups) == 113_934_953_536
    assert sum(group.nbytes for group in groups) == 228_107_858_176
    assert sum(group.dtypes.get(torch.float32, 0) for group in groups) == 118_975_552
    layout = RankLayout.of(config, released_tokens(), ulysses=8, expert=8)
    plan = plan_step(config, layout, H200, text_tokens=444, weights=groups)
    # The page's figures count the router's rows among the weights that are whole on every rank.
    router = 36 * (12 * 256 * 256 + 2 * 12 * 256) * 4
    experts = plan.expert_bytes - router * 2 // 12
    assert experts == 2 * 36 * 503_316_480
    assert round(experts / GIB, 2) == 33.75
    assert round((plan.other_weight_bytes + router) / GIB, 2) == 9.94
    assert plan.fits
    assert not plan_step(
        config, RankLayout.of(config, released_tokens()), H200, text_tokens=444, weights=groups
    ).fits


def test_released_model_has_its_documented_traffic():
    config = presets.preview()
    padded = plan_exchanges(config, RankLayout.of(config, released_tokens(), ulysses=8, expert=8))
    found = {e.name: (e.count, round(e.buffer_bytes / 1e6, 2)) for e in padded}
    assert found == {
        QKV: (40, 68.24),
        OUTPUT: (40, 22.75),
        DISPATCH: (36, 30.33),
        RETURN: (36, 30.33),
        RESULT: (1, 0.95),
    }
    assert [e.sent_bytes * 8 == e.buffer_bytes * 7 for e in padded[:4]] == [True] * 4
    unpadded = plan_exchanges(config, RankLayout.of(config, released_tokens(), ulysses=8))
    assert round(unpadded[2].buffer_bytes / 1e6, 2) == 22.75


@pytest.mark.parametrize(("ulysses", "cfg", "expert"), [(4, 1, 4), (4, 1, 2), (2, 2, 2), (2, 2, 1)])
def test_planned_bytes_are_those_of_the_traffic_record(ulysses, cfg, expert):
    config = presets.tiny()
    packed = without_padding(packed_pair(config))
    ends = packed.cu_seqlens.tolist()
    layout = RankLayout.of(
        config, (ends[1], ends[2] - ends[1]), ulysses=ulysses, cfg=cfg, expert=expert
    )

    def program():
        mesh = init_device_mesh("cpu", (cfg, ulysses), mesh_dim_names=("cfg", "sequence"))
        topology = Topology.of_mesh(mesh, cfg="cfg", expert_size=expert)
        model = model_of(config, topology)
        dist.barrier()
        with torch.no_grad():
            model(*packed)

    exchanges = simulate_world(ulysses * cfg, program).traffic.select("all_to_all_single")
    row = exchanges.matrix[0]
    planned = plan_exchanges(config, layout)
    assert sum(e.count * (sum(e.sent[0]) - e.sent[0][0]) for e in planned) == sum(row[1:])
    assert (BRANCHES in [e.name for e in planned]) == (cfg == 2)


@pytest.mark.parametrize("preset", [presets.tiny, presets.tiny_uneven])
@pytest.mark.parametrize("expert", [1, 2])
def test_weights_of_a_rank_are_those_of_its_model(preset, expert):
    config = preset()
    layout = RankLayout.of(config, (60, 60), ulysses=2, expert=expert)
    plan = plan_step(config, layout, H200, text_tokens=20)

    def program():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("sequence",))
        topology = Topology.of_mesh(mesh, expert_size=expert)
        state = Magi2Transformer(config, topology=topology, device="meta").state_dict()
        sharded = sum(tensor.nbytes for name, tensor in state.items() if is_sharded(name))
        return sharded, sum(tensor.nbytes for tensor in state.values()) - sharded

    results = simulate_world(2, program).results
    assert (plan.expert_bytes, plan.other_weight_bytes) == results[0]
    readings = plan_reading(config, layout, plan.weights)
    assert [reading.nbytes for reading in readings] == [sum(r) for r in results[:expert]]
    assert sum(len(reading.ranks) for reading in readings) == 2


def test_reading_counts_stored_bytes_and_shards(tmp_path):
    config = presets.tiny_uneven()
    state = random_state_dict(config)
    save_checkpoint(state, config, tmp_path, 1 << 16)
    layout = RankLayout.of(config, (60, 60), ulysses=6, expert=6)
    opened = open_checkpoint(tmp_path)
    readings = plan_reading(config, layout, weight_groups(config), opened)
    assert [len(reading.heads) for reading in readings] == [1, 1, 1, 0, 0, 0]
    whole = sum(tensor.nbytes for name, tensor in state.items() if not is_sharded(name))
    assert readings[5].nbytes == whole
    assert sum(r.nbytes - whole for r in readings) == sum(t.nbytes for t in state.values()) - whole
    assert readings[0].num_shards == len(opened.files) > readings[5].num_shards


def test_work_of_a_lone_rank_is_two_operations_for_each_active_weight(preview):
    config, _ = preview
    layout = RankLayout.of(config, (1000, 0))
    work = plan_work(config, layout, text_tokens=0)
    weights = sum(part.flops for name, part in work.items() if name != "attention") / 2 / 1000
    # Norms, biases and maps are active too, and the adapters here know the widest latent alone.
    assert math.isclose(weights, 5_946_004_528, rel_tol=1e-3)
    assert work["attention"].flops == 40 * 4 * 1000**2 * 24 * 128


def test_work_divides_over_ranks():
    config = presets.preview()
    lone = plan_work(config, RankLayout.of(config, released_tokens()), 0)
    for sizes in ({"ulysses": 8, "expert": 4}, {"ulysses": 4, "cfg": 2, "expert": 4}):
        shared = plan_work(config, RankLayout.of(config, released_tokens(), **sizes), 0)
        for name, part in shared.items():
            assert part.flops * 8 == lone[name].flops, name


def test_time_is_the_longer_of_computing_and_moving_plus_exchanges():
    config = presets.preview()
    device = DeviceProfile(
        name="made up",
        source="here",
        bf16_flops=1e12,
        fp32_flops=1e12,
        memory_bytes=1e9,
        memory_bandwidth=1e30,
        link_bandwidth=1e9,
        network_bandwidth=1e9,
        matmul_fraction=1.0,
        bandwidth_fraction=1.0,
    )
    layout = RankLayout.of(config, released_tokens(), ulysses=8, expert=4)
    plan = plan_step(config, layout, device, text_tokens=444)
    computing = sum(work.flops for work in plan.work.values()) / 1e12
    sent = sum(e.count * e.sent_bytes for e in plan.exchanges) / 1e9
    latency = sum(e.count for e in plan.exchanges) * 10e-6
    assert math.isclose(plan.seconds, computing + sent + latency, rel_tol=1e-9)
    assert device.seconds(bf16=0, fp32=2e12, nbytes=5e30) == 5.0


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"ulysses": 5}, "expected one of"),
        ({"ulysses": 8, "expert": 3}, "expert parallel size 3"),
        ({"cfg": 3}, "expected 1 or 2"),
    ],
)
def test_topologies_that_the_model_cannot_have_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        RankLayout.of(presets.preview(), (10, 10), **sizes)


def test_device_profiles_are_read_strictly(tmp_path):
    path = tmp_path / "device.json"
    numbers = {"bf16_flops": 1e12, "fp32_flops": 1e12, "memory_bytes": 1e9}
    numbers |= {"memory_bandwidth": 1e9, "link_bandwidth": 1e9, "network_bandwidth": 1e9}
    path.write_text(json.dumps({"name": "one", "source": "measured", **numbers}))
    assert DeviceProfile.from_file(path).ranks_per_node == 8
    path.write_text(json.dumps({"name": "one", "source": "measured", **numbers, "flops": 1}))
    with pytest.raises(ValueError, match="flops"):
        DeviceProfile.from_file(path)
    path.write_text(json.dumps({"name": "", "source": "", **numbers, "memory_bytes": 0}))
    with pytest.raises(ValueError, match="memory_bytes"):
        DeviceProfile.from_file(path)
