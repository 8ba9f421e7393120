"""Programs on ranks, however these were started, and what becomes of a rank that fails."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from magi2.launch import (
    _FAILURE_KEY,
    ParallelSizes,
    RankFailedError,
    Ranks,
    _explain,
    run_on_ranks,
)
from tests.ranks import rank_outcomes, run_ranks

IN_TIME = 20.0  # seconds; gloo alone would wait for a minute here, and half an hour elsewhere


def places(ranks: Ranks) -> tuple:
    """What a rank knows about itself, and that it can reach the others."""
    topology = ranks.topology
    total = torch.ones(1)
    if ranks.world_size > 1:
        dist.all_reduce(total)
    return (
        ranks.rank,
        ranks.world_size,
        (topology.cfg_rank, topology.cfg_size),
        (topology.sequence_rank, topology.sequence_size),
        (topology.expert_rank, topology.expert_size),
        int(total),
        ranks.on_first(lambda: {"tensor": torch.arange(3), "rank": ranks.rank})["rank"],
    )


def all_places(ranks: Ranks) -> list:
    mine = places(ranks)
    gathered = [None] * ranks.world_size
    if ranks.world_size == 1:
        return [mine]
    dist.all_gather_object(gathered, mine)
    return gathered


@pytest.mark.parametrize(
    ("sizes", "simulate", "expected"),
    [
        (ParallelSizes(), 1, [(0, 1, (0, 1), (0, 1), (0, 1), 1, 0)]),
        (
            ParallelSizes(cfg=2, expert=1),
            4,
            [(r, 4, (r // 2, 2), (r % 2, 2), (0, 1), 4, 0) for r in range(4)],
        ),
        (
            ParallelSizes(ulysses=3),
            3,
            [(r, 3, (0, 1), (r, 3), (r, 3), 3, 0) for r in range(3)],
        ),
    ],
)
def test_simulated_ranks_know_their_places(sizes, simulate, expected):
    assert (
        run_on_ranks(all_places, sizes, num_expert_heads=12, simulate=simulate, device="cpu")
        == expected
    )


def test_experts_take_what_leaves_no_head_to_pad():
    found = run_on_ranks(all_places, ParallelSizes(), num_expert_heads=12, simulate=8, device="cpu")
    assert [place[4] for place in found] == [(r % 4, 4) for r in range(8)]


def test_a_bare_process_is_one_rank(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert run_on_ranks(all_places, ParallelSizes(), device="cpu", backend="gloo") == [
        (0, 1, (0, 1), (0, 1), (0, 1), 1, 0)
    ]
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("sizes", "ranks", "words"),
    [
        (ParallelSizes(ulysses=3), 4, "ulysses degree 3 x cfg parallel size 1"),
        (ParallelSizes(cfg=2), 3, "cfg parallel size 2 does not give the 3 rank"),
        (ParallelSizes(cfg=2), 1, "Start 2 ranks"),
        (ParallelSizes(expert=3), 4, "expert parallel size 3 does not divide"),
    ],
)
def test_sizes_that_do_not_fit_the_ranks_are_refused(sizes, ranks, words):
    with pytest.raises(ValueError, match=words):
        run_on_ranks(places, sizes, simulate=ranks, device="cpu")


@pytest.mark.parametrize("wrong", [{"ulysses": 0}, {"expert": -1}, {"cfg": 3}])
def test_sizes_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match="expected"):
        ParallelSizes(**wrong)


def test_a_simulated_rank_that_raises_ends_the_run_with_its_error():
    def program(ranks: Ranks) -> None:
        if ranks.rank == 2:
            raise ValueError("the odd rank's own trouble")
        dist.barrier()

    with pytest.raises(ValueError, match="the odd rank's own trouble"):
        run_on_ranks(program, ParallelSizes(), simulate=4, device="cpu")


def test_an_error_on_the_first_rank_is_the_error_of_the_run():
    with pytest.raises(ValueError, match="an unreadable prompt"):
        run_on_ranks(first_raises, ParallelSizes(), simulate=3, device="cpu")


def started(group: dist.ProcessGroup, name: str) -> object:
    """One scenario on this gloo rank; a failure as its text, and whether it is to be printed."""
    sizes = ParallelSizes(cfg=2) if name == "places" else ParallelSizes()
    began = time.monotonic()
    try:
        return run_on_ranks(SCENARIOS[name], sizes, device="cpu")
    except RankFailedError as error:
        return str(error), error.speaks, type(error.__cause__).__name__, time.monotonic() - began


def one_after_another(group: dist.ProcessGroup, names: list[str]) -> list[object]:
    """Scenarios that leave the group usable, each as if it were the first."""
    results = []
    for name in names:
        results.append(started(group, name))
        dist.barrier()
        if group.rank() == 0:
            _get_default_store().delete_key(_FAILURE_KEY)
        dist.barrier()
    return results


def one_raises(ranks: Ranks) -> None:
    if ranks.rank == 1:
        raise ValueError("the odd rank's own trouble")
    dist.barrier()


def one_is_killed(ranks: Ranks) -> None:
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def all_raise(ranks: Ranks) -> None:
    raise ValueError("everybody's trouble")


def first_raises(ranks: Ranks) -> None:
    def refuse() -> None:
        raise ValueError("an unreadable prompt")

    ranks.on_first(refuse)


SCENARIOS = {
    "places": places,
    "one_raises": one_raises,
    "one_is_killed": one_is_killed,
    "all_raise": all_raise,
    "first_raises": first_raises,
}


@pytest.mark.gloo
def test_a_process_that_raises_stops_the_others_which_name_it():
    outcomes = rank_outcomes(started, 2, "one_raises", timeout=60)
    texts = [outcome.result for outcome in outcomes]
    assert texts[1][:3] == ("rank 1 of 2: the odd rank's own trouble", True, "ValueError")
    text, speaks, _, seconds = texts[0]
    assert text == "rank 0 of 2: stopped, because rank 1 failed: the odd rank's own trouble"
    assert speaks
    assert seconds < IN_TIME


@pytest.mark.gloo
def test_a_process_that_is_killed_stops_the_others():
    outcomes = rank_outcomes(started, 2, "one_is_killed", timeout=60)
    assert outcomes[1].exit_code == -signal.SIGKILL
    text, speaks, _, seconds = outcomes[0].result
    assert text.startswith("rank 0 of 2: another rank is gone")
    assert speaks
    assert seconds < IN_TIME


def test_a_rank_that_is_waited_for_in_vain_is_told_of():
    error = RuntimeError("[gloo] Timed out waiting 6000ms for send operation to complete")
    assert _explain(error).startswith("another rank did not answer before the timeout")
    assert _explain(RuntimeError("other")) == "RuntimeError: other"
    assert _explain(ValueError("plain")) == "plain"


@pytest.mark.gloo
def test_one_process_speaks_for_a_trouble_that_all_have():
    names = ["places", "all_raise", "first_raises"]
    results = run_ranks(one_after_another, 2, names)
    found, all_failed, first_failed = zip(*results, strict=True)
    assert list(found) == [(r, 2, (r, 2), (0, 1), (0, 1), 2, 0) for r in range(2)]
    assert sorted(speaks for _, speaks, *_ in all_failed) == [False, True]
    assert all("everybody's trouble" in text for text, *_ in all_failed)
    assert first_failed[0][:3] == ("rank 0 of 2: an unreadable prompt", True, "ValueError")
    text, speaks, kind, _ = first_failed[1]
    assert "rank 0 failed: ValueError: an unreadable prompt" in text
    assert (speaks, kind) == (False, "OtherRankError")
