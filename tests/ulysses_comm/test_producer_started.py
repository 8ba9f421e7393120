"""Kernels that store to a send buffer that the peers read: the bits and protocol of `start_...`.

The stand-in for such a kernel copies rows to the addresses that it is given; see `symmetric_ranks`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ulysses_comm as uc
from tests.bits import assert_same_bits
from tests.ulysses_comm.symmetric_ranks import (
    collectively,
    folder_of,
    run_interpreted,
    use_files,
)
from tests.ulysses_comm.test_producer import (
    SPLITS,
    inputs_of,
    needs_triton,
    opened,
    produce,
    store,
)
from tests.ulysses_comm.test_symmetric_exchange import Late
from ulysses_comm.symmetric import choice

Handle = uc.Pending[list[torch.Tensor]]


def started(
    group: uc.Group, inputs: Sequence[torch.Tensor], splits: Sequence[int], **options: object
) -> Handle:
    target = opened(group, inputs, splits, started=True, **options)
    store(target, inputs)
    return target.start()


def check(
    group: dist.ProcessGroup, results: Sequence[torch.Tensor], splits: Sequence[int], number: int
) -> None:
    rank, world = group.rank(), group.size()
    whole = [inputs_of(group, r, splits[r], number) for r in range(world)]
    for index, one in enumerate(results):
        want = torch.cat([of[index] for of in whole]).chunk(world, dim=1)[rank]
        assert_same_bits(one.contiguous(), want.contiguous())


def gives_the_started_bits(group: dist.ProcessGroup, folder: str) -> None:
    from ulysses_comm.kernels import push

    rank = group.rank()
    state = use_files(group, folder)
    for splits in SPLITS[group.size()]:
        inputs = inputs_of(group, rank, splits[rank], 0)
        expected = uc.start_scatter_heads_gather_seqlen(inputs, splits, group).wait()
        with collectively(group):
            fallen_back = started(group, inputs, splits).wait()
        with mock.patch.object(push, "pack_kernel", None):  # nothing is packed
            direct = started(group, inputs, splits).wait()
            target = opened(group, inputs, splits, started=True)
            store(target, inputs)
            mine = [tensor.chunk(group.size(), dim=1)[rank] for tensor in inputs]
            assert_same_bits(target.own.contiguous(), torch.cat(mine, dim=1))
            place = target.own.data_ptr()
            again = target.start().wait()
        assert target.is_direct == (sum(splits) > 0)
        if target.is_direct and splits[rank]:  # this rank's own rows lie where they were stored
            offset = sum(splits[:rank]) * target.row_elements * again[0].element_size()
            assert again[0].data_ptr() + offset == place
        for results in (direct, fallen_back, again):
            for one, other in zip(results, expected, strict=True):
                assert (one.shape, one.stride()) == (other.shape, other.stride())
                assert_same_bits(one.contiguous(), other.contiguous())
        with pytest.raises(RuntimeError, match=r"start\(\) was called before"):
            target.start()
        with pytest.raises(RuntimeError, match=r"finish\(\) on a target .* expected start"):
            target.finish()
        with pytest.raises(RuntimeError, match=r"start\(\) was called: use the tensors"):
            _ = target.own
    assert state.unstarted == []


def meets_the_other_forms(group: dist.ProcessGroup, folder: str) -> None:
    """Any order of forms, and another form on every rank."""
    use_files(group, folder, slots=2)
    rank, world = group.rank(), group.size()
    splits = SPLITS[world][0]
    held = []
    for number in range(6):
        inputs = inputs_of(group, rank, splits[rank], number)
        if number % 4 == 0 or number % world == rank:
            pending = started(group, inputs, splits, validate=number == 4)
        else:
            pending = uc.start_scatter_heads_gather_seqlen(
                inputs, splits, group, validate=number == 4
            )
        held.append((pending, number))
        # Plain exchanges go on, also while a target is open, and they may be opened ones.
        if number % 3 == 0:
            inputs = inputs_of(group, rank, splits[rank], 100 + number)
            target = opened(group, inputs, splits, started=True)
            other = inputs_of(group, rank, splits[rank], 200 + number)
            plain = produce(group, other, splits)
            store(target, inputs)
            check(group, uc.scatter_heads_gather_seqlen(other, splits, group), splits, 200 + number)
            held.append((target.start(), 100 + number))
            check(group, plain, splits, 200 + number)
    # Results are the caller's own, however many exchanges follow.
    for pending, number in held:
        check(group, pending.wait(), splits, number)
    for pending, number in held:
        check(group, pending.wait(), splits, number)


def several_are_open(group: dist.ProcessGroup, folder: str) -> None:
    """Two stored before either is started, then one more each time; the third is refused."""
    state = use_files(group, folder)
    rank, splits = group.rank(), SPLITS[group.size()][0]

    def begin(number: int) -> uc.HeadScatterTarget:
        inputs = inputs_of(group, rank, splits[rank], number)
        target = opened(group, inputs, splits, started=True)
        store(target, inputs)
        return target

    targets = [begin(0), begin(1)]
    assert not {*targets[0].addresses.tolist()} & {*targets[1].addresses.tolist()}
    before = (state.started, list(state.words))
    inputs = inputs_of(group, rank, splits[rank], 9)
    with pytest.raises(RuntimeError, match=r"2 targets .* open and not started"):
        begin(9)
    with pytest.raises(RuntimeError, match=r"expected start\(\) in the order"):
        targets[1].start()
    with pytest.raises(RuntimeError, match="before the group's next start_"):
        uc.start_scatter_heads_gather_seqlen(inputs, splits, group)
    assert (state.started, list(state.words)) == before
    handles = []
    for number in range(2, 5):
        handles.append(targets.pop(0).start())
        targets.append(begin(number))
    handles += [target.start() for target in targets]
    for number, pending in enumerate(handles):
        check(group, pending.wait(), splits, number)


def buffers_are_read_first(group: dist.ProcessGroup, folder: str) -> None:
    """A kernel may store again once the slowest rank has read what it stored before."""
    from ulysses_comm.kernels import signals

    state = use_files(group, folder)
    rank, splits = group.rank(), SPLITS[group.size()][0]
    late = mock.patch.object(signals, "await_kernel", Late(signals.await_kernel))
    for number in range(3):
        state.started = 0  # the same buffer each time
        inputs = inputs_of(group, rank, splits[rank], number)
        with late if rank == 1 else contextlib.nullcontext():
            check(group, started(group, inputs, splits).wait(), splits, number)


def memory_runs_out(group: dist.ProcessGroup, folder: str) -> None:
    """A rank without memory for its result has not taken part, and may try again."""
    use_files(group, folder)
    rank, splits = group.rank(), SPLITS[group.size()][0]
    inputs = inputs_of(group, rank, splits[rank], 0)
    started(group, inputs, splits).wait()
    full = mock.patch.object(torch, "empty", side_effect=[torch.empty(0), MemoryError("no room")])
    if rank == 0:
        with full, pytest.raises(MemoryError, match="no room"):
            opened(group, inputs, splits, started=True)
    check(group, started(group, inputs, splits).wait(), splits, 0)


def is_called_wrongly(group: dist.ProcessGroup, folder: str) -> None:
    use_files(group, folder)
    rank, splits = group.rank(), SPLITS[group.size()][0]
    inputs = inputs_of(group, rank, splits[rank], 0)
    plain, later = opened(group, inputs, splits), opened(group, inputs, splits, started=True)
    with pytest.raises(RuntimeError, match=r"start\(\) .* without started=True: expected finish"):
        plain.start()
    with pytest.raises(RuntimeError, match=r"finish\(\) .* with started=True: expected start"):
        later.finish()
    for target in (plain, later):  # nothing was lost
        store(target, inputs)
    check(group, plain.finish(), splits, 0)
    check(group, later.start().wait(), splits, 0)
    with pytest.raises(uc.RankDisagreementError, match=r"transport: .*pull.* on rank 0, .*push"):
        opened(group, inputs, splits, started=rank == 0, validate=True)


def is_dropped(group: dist.ProcessGroup, folder: str) -> None:
    use_files(group, folder)
    rank, splits = group.rank(), SPLITS[group.size()][0]
    inputs = inputs_of(group, rank, splits[rank], 0)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ulysses_comm").addHandler(handler)
    opened(group, inputs, splits, started=True)  # dropped at once
    (text,) = said
    assert f"rank {rank} dropped a HeadScatterTarget without start(). The other" in text
    for call in (
        lambda: uc.scatter_heads_gather_seqlen(inputs, splits, group),
        lambda: uc.start_scatter_heads_gather_seqlen(inputs, splits, group),
        lambda: produce(group, inputs, splits),
        lambda: started(group, inputs, splits),
    ):
        with pytest.raises(RuntimeError, match=r"dropped .* without start\(\), so that"):
            call()
    logging.getLogger("ulysses_comm").removeHandler(handler)


def in_turn(group: dist.ProcessGroup, folder: str) -> None:
    attempts = [gives_the_started_bits, meets_the_other_forms]
    if group.size() == 2:
        attempts += [several_are_open, memory_runs_out, is_called_wrongly]
        attempts += [buffers_are_read_first, is_dropped]
    for number, attempt in enumerate(attempts):
        place = Path(folder) / str(number)
        place.mkdir(exist_ok=True)
        choice._CHOSEN.pop(group, None)
        attempt(group, str(place))


@needs_triton
@pytest.mark.gloo
@pytest.mark.parametrize("world_size", [2, 3])
def test_what_a_kernel_stores_is_what_the_started_exchange_gives(
    world_size: int, tmp_path: Path
) -> None:
    run_interpreted(in_turn, world_size, folder_of(tmp_path))


def test_a_lone_rank_starts_what_is_there() -> None:
    inputs = inputs_of(uc.LONE_RANK, 0, 3, 0)
    pending = started(uc.LONE_RANK, inputs, [3])
    for one, other in zip(pending.wait(), inputs, strict=True):
        assert_same_bits(one.contiguous(), other)
    target = opened(uc.LONE_RANK, inputs, [3], started=True)
    assert not target.is_direct
    with pytest.raises(RuntimeError, match="expected start"):
        target.finish()
    del target  # harms nobody


def test_simulated_ranks_start_in_place() -> None:
    def step(group: dist.ProcessGroup) -> None:
        splits = [2, 3]
        handles = [
            started(group, inputs_of(group, group.rank(), splits[group.rank()], number), splits)
            for number in range(4)
        ]
        for number, pending in enumerate(handles):
            check(group, pending.wait(), splits, number)

    uc.simulate(2, step)
