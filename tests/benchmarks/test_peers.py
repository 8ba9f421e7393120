"""The peer benchmark: wrong or dying peers are named and left out, ratios are taken in pairs."""

from __future__ import annotations

import dataclasses
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from benchmarks.peers import ours, plain, registry
from benchmarks.peers.case import Case, World, split_sizes
from benchmarks.peers.ranks import RanksFailedError, run_ranks
from benchmarks.peers.rows import markdown, rows_of
from benchmarks.peers.timing import Sample, measure
from benchmarks.peers.way import OUTPUT, QKV, Missing, Peer, version_of

pytestmark = pytest.mark.gloo

SMALL = Case("bf16", (6, 2), heads=4, head_dim=8, backward=True)


def one_rank_aborts(group: dist.ProcessGroup) -> None:
    if group.rank() == 1:
        os.abort()
    dist.barrier(group)


def one_rank_raises(group: dist.ProcessGroup) -> None:
    if group.rank() == 0:
        raise ValueError("the shapes differ\nand more")
    time.sleep(30)


def never_ends(group: dist.ProcessGroup) -> None:
    time.sleep(30)


@pytest.mark.parametrize(
    ("function", "timeout", "message"),
    [
        (one_rank_aborts, 30.0, f"aborts the process ({signal.SIGABRT.name})"),
        (one_rank_raises, 30.0, "ValueError: the shapes differ"),
        (never_ends, 3.0, "hangs"),
    ],
    ids=["aborts", "raises", "hangs"],
)
def test_ranks_that_fail_are_reported_and_gone(function, timeout: float, message: str) -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailedError) as failure:
        run_ranks(function, 2, timeout=timeout)
    assert str(failure.value) == message
    assert time.monotonic() - start < 25


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("splits", [(4, 4), (6, 2)])
def test_every_way_of_ours_is_checked_and_timed(splits: tuple[int, ...], backward: bool) -> None:
    case = dataclasses.replace(SMALL, split_sizes=splits, backward=backward)
    of_ranks = run_ranks(measure, 2, case, [], 3, 30.0, timeout=60.0)
    rows = rows_of(case, of_ranks, cannot={"peer": "hangs"}, device="cpu", versions={})
    assert [row.exchange for row in rows] == ["qkv", "output", "total"]
    total = rows[-1]
    assert set(total.us) == {
        ours.KEPT,
        ours.KEPT_FLAT,
        ours.IN_PLACE,
        ours.DEFAULT,
        ours.DEFAULT_FLAT,
        plain.PLAIN,
        plain.BY_HAND,
    }
    assert all(row.rounds == 3 and row.best_peer is None for row in rows)
    assert total.to_kept[ours.KEPT] == total.to_default[ours.DEFAULT] == 1.0


def test_a_ratio_is_the_median_within_rounds_and_the_slowest_rank_counts() -> None:
    def sample(*wall: float) -> Sample:
        return Sample(list(wall), [1.0] * len(wall), [0.0] * len(wall))

    names = {
        QKV: [ours.KEPT, ours.IN_PLACE, ours.DEFAULT],
        OUTPUT: [ours.KEPT, ours.KEPT_FLAT, ours.DEFAULT, ours.DEFAULT_FLAT],
    }
    first = {(e, name): sample(1.0, 10.0, 100.0) for e in names for name in names[e]}
    second = {key: sample(1.0, 1.0, 1.0) for key in first}
    for exchange in (QKV, OUTPUT):
        first[exchange, "peer"] = sample(1.0, 1.0, 1.0)
        second[exchange, "peer"] = sample(2.0, 30.0, 150.0)
    row = rows_of(SMALL, [first, second], cannot={}, device="cpu", versions={})[0]
    assert row.us["peer"] == 30.0
    assert row.to_kept["peer"] == 2.0, "2/1, 30/10, 150/100"
    assert row.cpu_us["peer"] == 2.0, "both ranks'"
    assert row.best_peer == "peer"
    assert "| W 2 bf16 uneven, qkv |" in markdown([row])


def test_a_way_with_a_wrong_result_or_gradient_is_refused() -> None:
    for exchange in (QKV, OUTPUT):
        tensors = World(SMALL).of_rank(exchange, 1)
        results, gradients = tensors.results, tensors.input_gradients
        tensors.check(results, gradients)
        tensors.check([result.unsqueeze(0) for result in results], gradients)
        flipped = [tensor.clone() for tensor in results], [tensor.clone() for tensor in gradients]
        for tensors_of in flipped:
            tensors_of[-1].view(torch.int16)[0, 0, 0] ^= 1
        for wrong in ((flipped[0], gradients), (results, flipped[1])):
            with pytest.raises(AssertionError, match="bits of"):
                tensors.check(*wrong)
        with pytest.raises(AssertionError, match="expected"):
            tensors.check([result[:-1] for result in results], gradients)


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_uneven_splits_have_the_same_sum(world_size: int) -> None:
    even, uneven = (split_sizes(world_size, 1024, even=even) for even in (True, False))
    assert sum(even) == sum(uneven)
    assert len(set(even)) == 1
    assert len(set(uneven)) > 1


def test_a_missing_peer_says_how_to_get_it() -> None:
    with pytest.raises(Missing, match="bench-peers"):
        version_of("no-such-package-of-anyone")
    for load in registry.LOADERS.values():
        try:
            peer = load()
        except Missing as missing:
            assert str(missing)  # noqa: PT017  # either outcome is one
        else:
            assert isinstance(peer, Peer)
            assert {way.exchange for way in peer.ways} == {QKV, OUTPUT}
            assert peer.version in version_of(peer.package)
