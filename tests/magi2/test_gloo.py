"""The model over real processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from magi2 import presets
from magi2.checkpoint import load_checkpoint, save_model
from magi2.options import Options
from magi2.topology import Topology
from magi2.transformer import Magi2Transformer
from tests.magi2.packed import packed_pair, without_padding
from tests.magi2.sharded import LAYOUTS, check_sharded, model_of, on_mesh, velocities
from tests.ranks import run_ranks

pytestmark = pytest.mark.gloo

SPLITS = {2: [None, [0, 75]], 4: [None, [30, 0, 44, 1]]}


def every_case(group: dist.ProcessGroup, folder: str) -> dict[str, torch.Tensor]:
    """All that these tests want to know from one start of the processes."""
    world_size, results = group.size(), {}
    for dtype in (torch.float32, torch.bfloat16):
        config = presets.tiny(dtype)
        packed = packed_pair(config)
        for splits in SPLITS[world_size]:
            for layout, options in LAYOUTS.items():
                results[f"{dtype} {splits} {layout}"] = velocities(
                    config, packed, Topology.of_group(group), options, splits
                )
    config = presets.tiny(torch.float32)
    packed = packed_pair(config)
    for expert_size in (1, 2, world_size):
        results[f"experts {expert_size}"] = on_mesh(config, packed, expert_size=expert_size)
    # 72 tokens: on four ranks both runs of two own equally many, and are exchanged over as one.
    results["replicas"] = on_mesh(
        config,
        without_padding(packed),
        expert_size=2,
        options=Options(replicated_expert_exchange=True),
        split_sizes=[72, 0] if world_size == 2 else [36, 0, 5, 31],
    )
    results["branches"] = on_mesh(config, without_padding(packed), cfg_size=2)
    save_model(model_of(config, Topology.of_group(group)), folder, max_shard_bytes=4 << 20)
    dist.barrier()
    loaded = Magi2Transformer(config, topology=Topology.of_group(group), device="meta")
    load_checkpoint(loaded, folder)
    with torch.no_grad():
        results["loaded"] = loaded(*packed)
    return results


@pytest.mark.parametrize("world_size", [2, 4])
def test_processes_equal_one_rank(world_size, tmp_path):
    per_rank = run_ranks(every_case, world_size, str(tmp_path / "saved"))
    expected = {
        dtype: velocities(presets.tiny(dtype), packed_pair(presets.tiny(dtype)))
        for dtype in (torch.float32, torch.bfloat16)
    }
    for case in per_rank[0]:
        results = [rank[case] for rank in per_rank]
        dtype = torch.bfloat16 if case.startswith("torch.bfloat16") else torch.float32
        if case in ("branches", "replicas"):
            config = presets.tiny(dtype)
            alone = velocities(config, without_padding(packed_pair(config)))
        else:
            alone = expected[dtype]
        check_sharded(results, alone, dtype)
    for dtype in expected:
        for splits in SPLITS[world_size]:
            first, *others = (per_rank[0][f"{dtype} {splits} {layout}"] for layout in LAYOUTS)
            assert all(torch.equal(first, other) for other in others)
    assert torch.equal(per_rank[0]["loaded"], per_rank[0][f"experts {world_size}"])
