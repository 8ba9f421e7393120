"""Experts over parts of a sequence group, and every collective of a forward counted."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter

import pytest
import torch

from magi2 import presets
from magi2.config import Magi2Config
from tests.magi2.golden import rms_error
from tests.magi2.packed import Packed, packed_pair, without_padding
from tests.magi2.sharded import SHARDED_RMS, check_sharded, on_mesh, velocities
from ulysses_comm.simulate import simulate_world

TINY = presets.tiny(torch.float32)
# As released: twelve heads of the mixture, which eight ranks do not divide.
TWELVE = dataclasses.replace(
    TINY, moe=dataclasses.replace(TINY.moe, num_heads=12, split_merge_size=192)
)
SPLITS = [20, 1, 0, 30, 0, 4, 20, 0]


@functools.cache
def pair() -> Packed:
    """A conditional and an unconditional sequence, without padding."""
    return without_padding(packed_pair(TINY))


@functools.cache
def alone(config: Magi2Config, branches: bool) -> torch.Tensor:
    return velocities(config, pair() if branches else packed_pair(TINY))


def run(config: Magi2Config, world_size: int, cfg_size: int, expert_size: int):
    packed = pair() if cfg_size == 2 else packed_pair(TINY)
    splits = SPLITS if world_size == 8 and cfg_size == 1 else None
    return simulate_world(
        world_size,
        lambda: on_mesh(
            config, packed, cfg_size=cfg_size, expert_size=expert_size, split_sizes=splits
        ),
    )


def test_sizes_of_expert_parallelism_equal_each_other():
    results = {size: run(TINY, 8, 1, size).results for size in (1, 2, 4, 8)}
    for size, ranks in results.items():
        check_sharded(ranks, alone(TINY, False), torch.float32)
        error = rms_error(ranks[0], results[1][0])
        assert error <= SHARDED_RMS[torch.float32], f"EP {size} against EP 1: {error:.1e}"


@pytest.mark.parametrize(
    ("cfg_size", "expert_size"), [(1, 8), (1, 4), (2, 4), (2, 2)], ids=lambda value: str(value)
)
def test_twelve_heads_inside_eight_ranks_equal_one_rank(cfg_size, expert_size):
    simulation = run(TWELVE, 8, cfg_size, expert_size)
    check_sharded(simulation.results, alone(TWELVE, cfg_size == 2), torch.float32)


@pytest.mark.parametrize(
    ("world_size", "cfg_size", "expert_size"),
    [(1, 1, 1), (2, 2, 1), (4, 1, 1), (4, 1, 2), (4, 1, 4), (8, 1, 4), (8, 2, 4), (8, 2, 2)],
)
def test_a_forward_has_these_collectives_and_no_other(world_size, cfg_size, expert_size):
    # Two around the attention of every layer, two around the experts of every mixture, one that
    # gathers the result, one more where branches have their own ranks: no sizes, no barriers.
    traffic = run(TINY, world_size, cfg_size, expert_size).traffic
    attention = 2 * TINY.num_layers if world_size > cfg_size else 0
    experts = 2 * len(TINY.moe.layers) if expert_size > 1 else 0
    gathers = int(world_size > cfg_size) + int(cfg_size > 1)
    calls = Counter(call.rank for record in traffic for call in record.calls)
    expected = attention + experts + gathers
    assert calls == (dict.fromkeys(range(world_size), expected) if expected else {})
    assert {record.kind for record in traffic} <= {"all_to_all_single"}


def test_padded_heads_cost_a_third_more_and_four_expert_ranks_cost_none():
    tokens, row = len(packed_pair(TINY).x), 192 * 4
    # The result's gathering and the attention send the same; what differs is the experts'.
    sent = {
        size: sum(sum(map(sum, record.sent)) for record in run(TWELVE, 8, 1, size).traffic)
        for size in (1, 4, 8)
    }
    experts = {size: sent[size] - sent[1] for size in (4, 8)}
    rounds = 2 * len(TWELVE.moe.layers)
    assert experts[4] == rounds * tokens * row
    assert experts[8] == rounds * tokens * row * 16 // 12
