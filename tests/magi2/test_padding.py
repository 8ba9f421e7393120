"""Padded requests: the model needs no padding and takes it, as the reference's packer makes it."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
import torch

from magi2 import presets
from magi2.topology import Topology
from tests.magi2.golden import golden_files, rms_error
from tests.magi2.packed import Packed, grid, packed_pair
from tests.magi2.sharded import SHARDED_RMS, check_sharded, on_mesh, velocities
from ulysses_comm.simulate import simulate, simulate_world

CONFIG = presets.tiny(torch.float32)
MULTIPLE = 48


def pieces(packed: Packed) -> list[Packed]:
    """Each sequence as a request of its own."""
    ends = packed.cu_seqlens.tolist()
    rows = (packed.x, packed.coords, packed.modality, packed.time_tokens)
    found = []
    for start, end in pairwise(ends):
        x, coords, modality, time = (tensor[start:end] for tensor in rows)
        found.append(Packed(x, coords, modality, torch.tensor([0, end - start]), time))
    return found


def pack(requests: list[Packed]) -> Packed:
    lengths = torch.tensor([0] + [len(request.x) for request in requests])
    parts = [(r.x, r.coords, r.modality, r.time_tokens) for r in requests]
    x, coords, modality, time = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return Packed(x, coords, modality, lengths.cumsum(0).int(), time)


def padding(rows: int, like: Packed) -> Packed:
    """Zeros, modality text, coordinates and a sequence of their own, no diffusion time."""
    return Packed(
        x=like.x.new_zeros(rows, like.x.shape[1]),
        coords=grid((rows, 1, 1)),
        modality=like.modality.new_full((rows,), 2),
        cu_seqlens=torch.tensor([0, rows]),
        time_tokens=like.time_tokens.new_zeros(rows, like.time_tokens.shape[1]),
    )


def padded(requests: list[Packed], multiple: int) -> Packed:
    missing = -sum(len(request.x) for request in requests) % multiple
    return pack([*requests, padding(missing, requests[0])])


@pytest.fixture(scope="module")
def pair() -> list[Packed]:
    """A conditional and an unconditional sequence of different lengths."""
    return pieces(packed_pair(CONFIG, video=(2, 3, 3), audio=6))[:2]


@pytest.mark.parametrize("world_size", [1, 2, 8])
def test_padding_to_a_multiple_changes_no_velocity(pair, world_size):
    plain, full = pack(pair), padded(pair, MULTIPLE)
    assert len(full.x) % MULTIPLE == 0
    assert len(plain.x) < len(full.x)
    results = simulate(
        world_size, lambda group: velocities(CONFIG, full, Topology.of_group(group))
    ).results
    check_sharded(results, velocities(CONFIG, full), torch.float32)
    real, pad = results[0].split([len(plain.x), len(full.x) - len(plain.x)])
    check_sharded([real], velocities(CONFIG, plain), torch.float32)
    assert not pad.any()


def test_branches_on_their_own_ranks_are_padded_each_for_itself(pair):
    full = pack([part for branch in pair for part in pieces(padded([branch], MULTIPLE))])
    assert len(full.cu_seqlens) == 5
    results = simulate_world(4, lambda: on_mesh(CONFIG, full, cfg_size=2)).results
    check_sharded(results, velocities(CONFIG, full), torch.float32)
    alone = [velocities(CONFIG, branch) for branch in pair]
    parts = results[0].split([len(part.x) for part in pieces(full)])
    for part, expected in zip(parts[::2], alone, strict=True):
        check_sharded([part], expected, torch.float32)


def test_packed_branches_equal_branches_run_one_by_one(pair):
    together = velocities(CONFIG, pack(pair)).split([len(branch.x) for branch in pair])
    for part, branch in zip(together, pair, strict=True):
        check_sharded([part], velocities(CONFIG, branch), torch.float32)


@golden_files("proxy.*")
def test_the_reference_packer_and_its_padding_are_accepted(golden):
    latent, audio, text = (golden[f"in.{n}"] for n in ("video_latent", "audio_latent", "text"))
    config = dataclasses.replace(
        CONFIG,
        video_channels=latent.shape[1],
        audio_channels=audio.shape[-1],
        text_channels=text.shape[-1],
    )
    names = ("tokens", "coords", "modality", "cu_seqlens", "time_token_sequence")
    packed = Packed(*(golden[f"out.{name}"] for name in names))
    results = simulate(8, lambda group: velocities(config, packed, Topology.of_group(group)))
    alone = velocities(config, packed)
    check_sharded(results.results, alone, torch.float32)
    assert alone.isfinite().all()
    pad_rows = int(golden.metadata["pad_rows"])
    if pad_rows:
        assert len(packed.x) % golden.config["align_to"] == 0
        plain = pack(pieces(packed)[:-1])
        assert rms_error(alone[:-pad_rows], velocities(config, plain)) <= SHARDED_RMS[torch.float32]
        assert not alone[-pad_rows:].any()
