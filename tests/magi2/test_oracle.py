"""The whole float32 model against a float64 one written from the specification alone.

Configurations and requests that no golden file has: grouped queries, softcap, several sinks,
softmax scores, one modality alone, sequences of one token, empty ones, padding.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from magi2 import presets
from magi2.config import Magi2Config
from magi2.modules.embeddings import time_embedding
from magi2.topology import Topology
from tests.magi2.golden import rms_error
from tests.magi2.oracle import Oracle
from tests.magi2.packed import TIME_COLUMNS, Packed, grid, packed_pair
from tests.magi2.sharded import SHARDED_RMS, model_of, velocities, whole_state_dict
from ulysses_comm.simulate import simulate

# Measured 8e-7: two right float32 implementations of four layers differ by as much.
RELATIVE_RMS = 3e-6
# The choice of experts must not hang on a rounding: float32 scores are right to about 1e-7.
MARGIN = 3e-6

TINY = presets.tiny_uneven(torch.float32)


def with_moe(**changes: object) -> Magi2Config:
    return dataclasses.replace(TINY, moe=dataclasses.replace(TINY.moe, **changes))


CONFIGS = {
    "uneven": TINY,
    "grouped queries": dataclasses.replace(TINY, num_kv_heads=2),
    "one key head": dataclasses.replace(TINY, num_kv_heads=1),
    "softcap and sinks": dataclasses.replace(TINY, attention_softcap=2.0, num_sinks=3),
    "two streams": dataclasses.replace(TINY, num_streams=2),
    "softmax scores": with_moe(score_func="softmax", top_k=3),
    "weights as scored": with_moe(route_norm=False, route_scale=0.7),
    "narrow mixture": with_moe(split_merge_size=48, top_k=1),
    "every layer alike": dataclasses.replace(
        with_moe(layers=(0, 3), shared_intermediate_size=16), multimodal_layers=()
    ),
}


def request(*kinds_of_sequences: list[tuple[int, torch.Tensor]]) -> Packed:
    """Sequences of (modality, coordinates) runs, filled with random features of every channel."""
    generator = torch.Generator().manual_seed(5)
    lengths = [sum(len(part) for _, part in parts) for parts in kinds_of_sequences]
    runs = [run for parts in kinds_of_sequences for run in parts]
    modality = torch.cat([torch.full((len(part),), kind) for kind, part in runs])
    return Packed(
        x=torch.randn(len(modality), TINY.input_channels, generator=generator),
        coords=torch.cat([part for _, part in runs]),
        modality=modality,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
        time_tokens=time_embedding(torch.rand(len(modality), generator=generator), TIME_COLUMNS),
    )


VIDEO, AUDIO, TEXT = (0, grid((2, 2, 2))), (1, grid((5, 1, 1))), (2, grid((4, 1, 1), (1, 1, 1)))
ONE = grid((1, 1, 1))
REQUESTS = {
    "video alone": request([VIDEO]),
    "audio alone": request([AUDIO]),
    "text alone": request([TEXT]),
    "no text": request([VIDEO, AUDIO], [VIDEO]),
    "sequences of one token": request([(0, ONE)], [(1, ONE)], [(2, ONE)], [VIDEO]),
    "an empty sequence": request([VIDEO], [], [TEXT]),
    "one token": request([(1, ONE)]),
    "text in two places": request([(2, ONE), VIDEO, TEXT, AUDIO, (3, ONE)]),
}


def check(config: Magi2Config, packed: Packed) -> None:
    oracle = Oracle(config, whole_state_dict(config))
    x, coords, modality, ends, time = packed
    with torch.no_grad():
        expected = oracle(x, coords, modality, ends.tolist(), time)
        result = model_of(config)(*packed)
    assert oracle.margin > MARGIN, "choose another seed: the routing is nearly tied"
    assert torch.equal(result == 0, expected == 0)
    error = rms_error(result, expected) if expected.any() else 0.0
    assert error <= RELATIVE_RMS, f"relative RMS {error:.1e}"


@pytest.mark.parametrize("name", CONFIGS)
def test_model_equals_the_oracle_for_every_kind_of_configuration(name):
    check(CONFIGS[name], packed_pair(TINY, video=(1, 2, 2), audio=2))


@pytest.mark.parametrize("name", REQUESTS)
def test_model_equals_the_oracle_for_every_kind_of_request(name):
    check(TINY, REQUESTS[name])


@pytest.mark.parametrize("name", REQUESTS)
@pytest.mark.parametrize("world_size", [2, 6])
def test_every_kind_of_request_is_sharded(name, world_size):
    packed = REQUESTS[name]
    results = simulate(
        world_size, lambda group: velocities(TINY, packed, Topology.of_group(group))
    ).results
    assert all(torch.equal(result, results[0]) for result in results[1:])
    alone = velocities(TINY, packed)
    assert torch.equal(results[0] == 0, alone == 0)
    if alone.any():
        assert rms_error(results[0], alone) <= SHARDED_RMS[torch.float32]
