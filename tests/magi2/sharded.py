"""Run the model on several ranks and compare with one, for simulated and real ranks alike."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from magi2.checkpoint.slices import rows_to_read
from magi2.config import Magi2Config
from magi2.initialise import random_state_dict
from magi2.options import Options
from magi2.topology import Topology
from magi2.transformer import Magi2Transformer
from tests.magi2.golden import rms_error
from tests.magi2.packed import Packed

# Every rank runs the same operations on fewer rows or heads, so a matrix product may add in
# another order. Relative RMS over four layers, float32: measured 8e-7. In bfloat16 most differences
# vanish in a rounding (measured 0 on a CPU), but one that does not can turn a near tie of the
# routing, and a few tokens then use another expert: measured up to 4e-2 on an H200. Where every
# expert is chosen that cannot happen, and 1e-2 holds there too.
SHARDED_RMS = {torch.float32: 3e-6, torch.bfloat16: 5e-2}
UNTIED_RMS = {torch.float32: 3e-6, torch.bfloat16: 1e-2}

PACKED = Options(qkv_head_shards=True, output_head_shards=True)
FLAT = Options(qkv_head_shards=False, output_head_shards=False)
LAYOUTS = {
    "packed": PACKED,
    "flat": FLAT,
    "packed in": Options(qkv_head_shards=True, output_head_shards=False),
    "packed out": Options(qkv_head_shards=False, output_head_shards=True),
}


whole_state_dict = functools.cache(random_state_dict)


def model_of(
    config: Magi2Config, topology: Topology | None = None, options: Options | None = None
) -> Magi2Transformer:
    """A rank's model with the usual random weights; ranks share memory, so read them only."""
    model = Magi2Transformer(config, options, topology, device="meta")
    local = {}
    for name, whole in whole_state_dict(config).items():
        rows = rows_to_read(name, model.expert_heads, config.moe.num_experts)
        local[name] = whole if rows is None else whole[rows.start : rows.stop]
    model.load_state_dict(local, assign=True)
    return model


def velocities(
    config: Magi2Config,
    packed: Packed,
    topology: Topology | None = None,
    options: Options | None = None,
    split_sizes: Sequence[int] | None = None,
    device: str = "cpu",
) -> torch.Tensor:
    """What one rank of a model with the usual random weights returns."""
    with torch.no_grad():
        model = model_of(config, topology, options).to(device)
        return model(*packed.to(device), split_sizes)


def on_mesh(
    config: Magi2Config,
    packed: Packed,
    *,
    cfg_size: int = 1,
    expert_size: int | None = None,
    options: Options | None = None,
    split_sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """The same on this rank of torch.distributed's world, cfg branches outermost."""
    shape = (cfg_size, dist.get_world_size() // cfg_size)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("cfg", "sequence"))
    topology = Topology.of_mesh(mesh, cfg="cfg", expert_size=expert_size)
    return velocities(config, packed, topology, options, split_sizes)


def all_experts(config: Magi2Config) -> Magi2Config:
    """The configuration with every expert chosen: no routing that a rounding could turn."""
    moe = dataclasses.replace(config.moe, top_k=config.moe.num_experts)
    return dataclasses.replace(config, moe=moe)


def check_sharded(
    results: Sequence[torch.Tensor],
    expected: torch.Tensor,
    dtype: torch.dtype,
    tolerances: Mapping[torch.dtype, float] = SHARDED_RMS,
) -> None:
    """Every rank has the same bits, close to those of a lone rank."""
    for result in results[1:]:
        assert torch.equal(result, results[0])
    error = rms_error(results[0], expected)
    assert error <= tolerances[dtype], f"relative RMS {error:.2e}"
