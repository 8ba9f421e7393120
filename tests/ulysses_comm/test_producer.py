"""Kernels that store to every rank's slot themselves: the plain exchange's bits, and its protocol.

The stand-in for such a kernel copies rows to the addresses that it is given; see `symmetric_ranks`.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import logging
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ulysses_comm as uc
from tests.bits import assert_same_bits
from tests.ulysses_comm.symmetric_ranks import (
    bits,
    collectively,
    folder_of,
    run_interpreted,
    use_files,
)

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="needs triton: pip install --no-deps triton==3.6.0 adds it to a CPU build of torch",
)

BF16 = torch.bfloat16
DIM = 8
SPLITS = {2: [(3, 5), (0, 4), (0, 0)], 3: [(2, 0, 3)]}


def inputs_of(group: uc.Group, rank: int, tokens: int, number: int) -> list[torch.Tensor]:
    """Queries with more heads than keys and values."""
    size = 1 if group is uc.LONE_RANK else group.size()
    return [bits((tokens, size * heads, DIM), BF16, rank, 10 * number + heads) for heads in (4, 2)]


def opened(
    group: uc.Group, inputs: Sequence[torch.Tensor], splits: Sequence[int], **options: object
) -> uc.HeadScatterTarget:
    counts = [tensor.shape[1] for tensor in inputs]
    return uc.open_head_scatter(counts, DIM, BF16, splits, group, device="cpu", **options)


def store(target: uc.HeadScatterTarget, inputs: Sequence[torch.Tensor]) -> None:
    """What a kernel does: each rank's heads of each token, dense, where its address says."""
    world = len(target.addresses)
    for rank, address in enumerate(target.addresses.tolist()):
        rows = torch.cat([tensor.chunk(world, dim=1)[rank] for tensor in inputs], dim=1)
        assert rows.numel() == target.tokens * target.row_elements
        ctypes.memmove(address, rows.contiguous().data_ptr(), rows.nbytes)


def produce(
    group: uc.Group, inputs: Sequence[torch.Tensor], splits: Sequence[int]
) -> list[torch.Tensor]:
    target = opened(group, inputs, splits)
    store(target, inputs)
    return target.finish()


def gives_the_plain_bits(group: dist.ProcessGroup, folder: str) -> None:
    rank = group.rank()
    state = use_files(group, folder, slots=4)
    for splits in SPLITS[group.size()]:
        inputs = inputs_of(group, rank, splits[rank], 0)
        with collectively(group):
            expected = uc.scatter_heads_gather_seqlen(inputs, splits, group)
            fallen_back = produce(group, inputs, splits)
        direct = produce(group, inputs, splits)
        for results in (direct, fallen_back):
            for one, other in zip(results, expected, strict=True):
                assert (one.shape, one.stride()) == (other.shape, other.stride())
                assert_same_bits(one.contiguous(), other.contiguous())
        target = opened(group, inputs, splits)
        assert target.is_direct == (sum(splits) > 0)
        store(target, inputs)
        mine = [tensor.chunk(group.size(), dim=1)[rank] for tensor in inputs]
        assert_same_bits(target.own.contiguous(), torch.cat(mine, dim=1))
        assert target.nbytes == sum(tensor.nbytes for tensor in inputs)
        target.finish()
        with pytest.raises(RuntimeError, match="finish\\(\\) was called before"):
            target.finish()
        with pytest.raises(RuntimeError, match="use the tensors"):
            _ = target.own
    assert state.opened == ""


@needs_triton
@pytest.mark.gloo
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_a_kernel_stores_is_what_the_plain_exchange_gives(
    world_size: int, tmp_path: Path
) -> None:
    run_interpreted(gives_the_plain_bits, world_size, folder_of(tmp_path))


def mixes(group: dist.ProcessGroup, folder: str) -> None:
    state = use_files(group, folder, slots=2)
    rank, splits = group.rank(), (3, 2)

    def expected(number: int) -> list[torch.Tensor]:
        whole = [inputs_of(group, r, splits[r], number) for r in range(2)]
        return [torch.cat([of[i] for of in whole]).chunk(2, dim=1)[rank] for i in range(2)]

    def check(results: Sequence[torch.Tensor], number: int) -> None:
        for one, other in zip(results, expected(number), strict=True):
            assert_same_bits(one.contiguous(), other.contiguous())

    def exchange(number: int, *, by_kernel: bool) -> list[torch.Tensor]:
        inputs = inputs_of(group, rank, splits[rank], number)
        if by_kernel:
            return produce(group, inputs, splits)
        return uc.scatter_heads_gather_seqlen(inputs, splits, group)

    # Any order, and one rank by a kernel while the other makes the plain exchange.
    for number in range(8):
        check(exchange(number, by_kernel=number % 3 == 0 or number % 2 == rank), number)
    started = uc.start_scatter_heads_gather_seqlen(
        inputs_of(group, rank, splits[rank], 20), splits, group
    )
    check(exchange(21, by_kernel=True), 21)
    check(started.wait(), 20)
    # Held results stay; with both slots lent the third is a copy, of staging.
    held = [exchange(number, by_kernel=number != 31) for number in (30, 31, 32)]
    assert state._pools[0].lent == 2
    for number in range(33, 36):
        check(exchange(number, by_kernel=True), number)
    for number, results in zip((30, 31, 32), held, strict=True):
        check(results, number)
    # Ranks may agree on it first, in both forms.
    inputs = inputs_of(group, rank, splits[rank], 40)
    if rank == 0:
        target = opened(group, inputs, splits, validate=True)
        store(target, inputs)
        check(target.finish(), 40)
    else:
        check(uc.scatter_heads_gather_seqlen(inputs, splits, group, validate=True), 40)


@needs_triton
@pytest.mark.gloo
def test_both_forms_meet_in_any_order_and_held_results_stay(tmp_path: Path) -> None:
    run_interpreted(mixes, 2, folder_of(tmp_path))


def drops(group: dist.ProcessGroup, folder: str) -> list[str]:
    use_files(group, folder)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ulysses_comm").addHandler(handler)
    rank, splits = group.rank(), (3, 2)
    inputs = inputs_of(group, rank, splits[rank], 0)
    target = opened(group, inputs, splits)
    for call in (
        lambda: uc.scatter_heads_gather_seqlen(inputs, splits, group),
        lambda: opened(group, inputs, splits),
    ):
        with pytest.raises(RuntimeError, match="is not finished: expected finish"):
            call()
    store(target, inputs)
    target.finish()
    target = opened(group, inputs, splits)
    del target
    for call in (
        lambda: uc.scatter_heads_gather_seqlen(inputs, splits, group),
        lambda: uc.start_scatter_heads_gather_seqlen(inputs, splits, group),
        lambda: opened(group, inputs, splits),
    ):
        with pytest.raises(RuntimeError, match=f"Rank {rank} dropped a HeadScatterTarget"):
            call()
    return said


@needs_triton
@pytest.mark.gloo
def test_a_group_refuses_to_go_on_after_a_target_was_dropped(tmp_path: Path) -> None:
    for rank, said in enumerate(run_interpreted(drops, 2, folder_of(tmp_path))):
        (text,) = said
        assert text.startswith(f"ulysses_comm: rank {rank} dropped a HeadScatterTarget without")


def test_a_lone_rank_stores_to_its_own_buffer() -> None:
    inputs = inputs_of(uc.LONE_RANK, 0, 3, 0)
    for one, other in zip(produce(uc.LONE_RANK, inputs, [3]), inputs, strict=True):
        assert one.shape == other.shape
        assert_same_bits(one.contiguous(), other)
    target = opened(uc.LONE_RANK, inputs, [3])
    assert not target.is_direct
    del target  # harms nobody
    assert uc.transport_of(uc.LONE_RANK) == "collective"


def test_simulated_ranks_send_in_place() -> None:
    def step(group: dist.ProcessGroup) -> list[torch.Tensor]:
        return produce(group, inputs_of(group, group.rank(), 2 + group.rank(), 0), [2, 3])

    results = uc.simulate(2, step).results
    group = uc.simulate(2, lambda group: group).results[0]
    whole = [inputs_of(group, r, 2 + r, 0) for r in range(2)]
    for rank, got in enumerate(results):
        for index, tensor in enumerate(got):
            want = torch.cat([of[index] for of in whole]).chunk(2, dim=1)[rank]
            assert_same_bits(tensor.contiguous(), want.contiguous())


@pytest.mark.parametrize("start", [False, True], ids=["plain", "started"])
def test_ranks_that_check_every_exchange_check_an_opened_one_once(
    start: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As often as a rank that takes part by the other form; they were out of step after it."""
    monkeypatch.setenv("ULYSSES_COMM_VALIDATE", "1")
    monkeypatch.setattr("ulysses_comm.agreement.DEFAULT_TIMEOUT", timedelta(seconds=3))

    def step(group: dist.ProcessGroup) -> list[torch.Tensor]:
        results: list[torch.Tensor] = []
        for number in range(3):
            inputs = inputs_of(group, group.rank(), 2 + group.rank(), number)
            if number % 2 == group.rank():
                target = opened(group, inputs, [2, 3], started=start)
                store(target, inputs)
                results += target.start().wait() if start else target.finish()
            elif start:
                results += uc.start_scatter_heads_gather_seqlen(inputs, [2, 3], group).wait()
            else:
                results += uc.scatter_heads_gather_seqlen(inputs, [2, 3], group)
        return results

    def plain(group: dist.ProcessGroup) -> list[torch.Tensor]:
        results: list[torch.Tensor] = []
        for number in range(3):
            inputs = inputs_of(group, group.rank(), 2 + group.rank(), number)
            results += uc.scatter_heads_gather_seqlen(inputs, [2, 3], group)
        return results

    for rank in range(2):
        ours, theirs = (uc.simulate(2, program).results[rank] for program in (step, plain))
        for one, other in zip(ours, theirs, strict=True):
            assert_same_bits(one.contiguous(), other.contiguous())


def test_refuses_what_it_cannot_open() -> None:
    def open_with(counts: Sequence[int], splits: Sequence[int] = (3,), dim: int = 8) -> None:
        uc.open_head_scatter(counts, dim, BF16, splits, uc.LONE_RANK, device="cpu")

    for counts, dim in (((), 8), ((2, 0), 8), ((2,), 0)):
        with pytest.raises(ValueError, match="over 1 ranks: expected one input at least"):
            open_with(counts, dim=dim)
    with pytest.raises(ValueError, match="split_sizes"):
        open_with((2,), (3, 4))
    with pytest.raises(ValueError, match=r"head_counts=1\.5: expected a whole number"):
        open_with((1.5,))  # type: ignore[arg-type]


def test_a_bad_argument_is_refused_on_its_rank_and_named_on_the_others() -> None:
    good = {"head_counts": [4], "head_dim": 8, "dtype": BF16, "split_sizes": [2, 2],
            "device": "cpu"}  # fmt: skip
    bad = {
        "head_counts": [4, {4}, "4", [[4]], [4.0], [True]],
        "head_dim": [8.0, "8", None],
        "dtype": ["bfloat16", None, torch.bfloat16.itemsize],
        "split_sizes": [2, {2}, [2.0, 2], "22", None],
        "device": ["gpu", None],
    }

    def step(group: dist.ProcessGroup, name: str, value: object) -> str:
        arguments = {**good, name: value} if group.rank() == 0 else good
        kind = ValueError if group.rank() == 0 else uc.RankDisagreementError
        with pytest.raises(kind, match=f"{name}=|split_sizes") as raised:
            uc.open_head_scatter(**arguments, group=group, validate=True)
        return str(raised.value)

    for name, values in bad.items():
        for value in values:
            texts = uc.simulate(2, functools.partial(step, name=name, value=value)).results
            assert f"rank 0 refused its own input: ValueError: {texts[0]}" in texts[1]
