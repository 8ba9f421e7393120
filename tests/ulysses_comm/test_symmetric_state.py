"""Slots, size classes and reports, each by itself."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from ulysses_comm.symmetric import pull
from ulysses_comm.symmetric.capture import capture_of
from ulysses_comm.symmetric.memory import Block, TorchMemory
from ulysses_comm.symmetric.pool import Pool, Slot, fitting, size_class
from ulysses_comm.symmetric.pull import PullWork
from ulysses_comm.symmetric.report import Report
from ulysses_comm.symmetric.state import GroupState


class Memory:
    """Blocks of one rank among two; the peer is not there."""

    def allocate(self, nbytes: int) -> Block:
        tensor = torch.zeros(nbytes, dtype=torch.uint8)
        return Block(tensor, (tensor.clone(),), (tensor.data_ptr(), 0), None)


def pool_of(count: int, nbytes: int = 4096) -> Pool:
    return Pool(nbytes, count, Memory(), torch.tensor)


def test_a_slot_is_free_once_no_view_of_its_result_is_left() -> None:
    pool = pool_of(2)
    first = pool.take(None)
    assert first is pool.slots[0]
    result = first.lend((4, 8), torch.float32)
    view = result[:, 2:].transpose(0, 1)
    del result
    assert pool.take(None) is pool.slots[1]
    assert pool.lent == 1
    del view
    assert pool.take(None) is first
    # Another shape and dtype of the same memory.
    again = first.lend((16,), torch.bfloat16)
    assert (again.shape, again.dtype) == ((16,), torch.bfloat16)
    assert not first.is_free()
    del again
    assert first.is_free()


def test_what_autograd_saved_keeps_a_slot() -> None:
    slot = pool_of(1).slots[0]
    result = slot.lend((4,), torch.float32)
    weight = torch.ones(4, requires_grad=True)
    product = weight * result
    del result
    assert not slot.is_free()
    product.sum().backward()
    del product
    gc.collect()
    assert slot.is_free()


def test_all_slots_lent_leaves_staging() -> None:
    pool = pool_of(2)
    held = []
    for _ in range(2):
        slot = pool.take(None)
        assert slot is not None
        held.append(slot.lend((1,), torch.uint8))
    assert pool.take(None) is None
    assert pool.staging.index == 2
    assert pool.bases.shape == (3, 2)
    assert int(pool.bases[2, 0]) == pool.staging.addresses[0]
    assert pool_of(0).take(None) is None


def test_a_graph_keeps_its_slots() -> None:
    pool = pool_of(2)
    mine = pool.take(7)
    assert mine is pool.slots[0]
    assert pool.take(7) is mine  # a later exchange of the same graph, once it is free
    assert pool.take(None) is pool.slots[1]
    assert pool.take(8) is pool.slots[1]  # free, and from now on the other graph's
    assert pool.take(None) is None


def test_a_result_outlives_its_pool() -> None:
    pool = pool_of(1)
    slot: Slot | None = pool.take(None)
    assert slot is not None
    result = slot.lend((4,), torch.uint8)
    result.fill_(3)
    del pool, slot
    gc.collect()
    assert result.tolist() == [3] * 4


def test_size_classes_waste_a_quarter_at_most_and_are_few() -> None:
    mib = 1 << 20
    assert size_class(1) == size_class(2 * mib) == 2 * mib
    sizes = [mib * number for number in range(2, 600)]
    classes = {size_class(size) for size in sizes}
    assert all(size <= size_class(size) <= size * 1.25 for size in sizes)
    assert len(classes) < 40
    assert all(size_class(nbytes) == nbytes for nbytes in classes)


def test_an_exchange_takes_the_smallest_pool_that_is_not_far_too_large() -> None:
    mib = 1 << 20
    pools = [SimpleNamespace(nbytes=mib * n) for n in (300, 16, 80)]
    assert fitting(pools, 70 * mib) is pools[2]
    assert fitting(pools, 81 * mib) is pools[0]
    assert fitting(pools, 20 * mib) is pools[2]
    assert fitting(pools, 17 * mib) is None
    assert fitting(pools, 301 * mib) is None
    assert fitting([SimpleNamespace(nbytes=2 * mib)], 1) is not None


def test_a_report_names_the_rank_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    report = Report(0, 60.0, pinned=False)
    assert report.text() == ""

    class Owner:
        pass

    owner = Owner()
    with caplog.at_level(logging.ERROR, logger="ulysses_comm"):
        report.watch(owner)
        report.words[1:] = torch.tensor([1, 12, 0])
        report.words[0] = 3
        deadline = time.monotonic() + 10
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.02)
        del owner
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "ulysses_comm: rank 0 gave up exchange 12 over symmetric memory: the data of rank 1 had "
        "not arrived, and this rank waited 60 s."
    )
    report.words[0] = 2
    assert "rank 1 means another exchange" in report.text()
    assert "waited" not in report.text()


def test_the_cpu_captures_nothing() -> None:
    assert capture_of(torch.device("cpu")) is None


class Stream:
    """What a stream was told to wait for."""

    device = torch.device("cuda", 1)

    def __init__(self) -> None:
        self.waited: list[str] = []

    def wait_event(self, event: str) -> None:
        self.waited.append(event)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> tuple[Stream, Stream]:
    """Where an exchange is started, and the current stream of its device later on."""
    started, current = Stream(), Stream()

    def current_stream(device: object = None) -> Stream:
        assert device == Stream.device, "the stream of another device orders nothing"
        return current

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(pull, "is_capturing", lambda stream: False)
    return started, current


def test_both_streams_wait_for_an_exchange(streams: tuple[Stream, Stream]) -> None:
    started, current = streams
    work = PullWork("copied", started, ())  # type: ignore[arg-type]
    work.wait()
    work.wait()
    del work
    assert (started.waited, current.waited) == (["copied"], ["copied"])
    PullWork("again", current, ()).wait()  # type: ignore[arg-type]
    assert current.waited == ["copied", "again"]


def test_a_dropped_exchange_holds_back_where_it_was_started(
    streams: tuple[Stream, Stream], monkeypatch: pytest.MonkeyPatch
) -> None:
    started, current = streams
    work = PullWork("copied", started, ())  # type: ignore[arg-type]
    del work
    assert (started.waited, current.waited) == (["copied"], [])
    # A graph is captured there since: CUDA would refuse, and spoil the capture.
    work = PullWork("later", started, ())  # type: ignore[arg-type]
    monkeypatch.setattr(pull, "is_capturing", lambda stream: True)
    del work
    assert started.waited == ["copied"]


def alone(seconds: float = 1.0) -> GroupState:
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    return GroupState(group, torch.device("cpu"), Memory(), 1, seconds)  # type: ignore[arg-type]


def test_the_longest_timeout_fits_the_kernels_clock() -> None:
    assert alone(timedelta.max.total_seconds()).timeout_ns == 2**63 - 1
    assert alone(1.5).timeout_ns == 1_500_000_000


def test_inputs_on_another_gpu_are_refused_on_the_rank_at_fault() -> None:
    state = alone()
    state.device = torch.device("cuda", 1)
    state.check_device(torch.device("cuda", 1))
    state.check_device(torch.device("cpu"))  # of the collective
    with pytest.raises(ValueError, match="inputs are on cuda:0: expected cuda:1, on which rank 0"):
        state.check_device(torch.device("cuda", 0))
    state.device = torch.device("cpu")
    assert state.serves([torch.ones(1)])
    assert not state.serves([torch.ones(1, device="meta")])
    state.device = torch.device("meta", 0)
    with pytest.raises(ValueError, match="are on meta: expected meta:0"):
        state.serves([torch.ones(1, device="meta")])


@pytest.mark.parametrize(("rank", "size"), [(0, 2), (1, 2), (0, 3)])
def test_a_group_that_torch_takes_for_another_is_refused(rank: int, size: int) -> None:
    tensor = torch.zeros(64, dtype=torch.uint8)
    found = SimpleNamespace(rank=rank, world_size=size, get_buffer=lambda *_: tensor)
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 2, group_name="0")
    torch_memory = TorchMemory(group, torch.device("cpu"))  # type: ignore[arg-type]
    with (
        mock.patch.object(torch.cuda, "device", return_value=contextlib.nullcontext()),
        mock.patch("torch._C._distributed_c10d._SymmetricMemory") as allocator,
        mock.patch("torch.distributed._symmetric_memory.rendezvous", return_value=found),
    ):
        allocator.empty_strided_p2p.return_value = tensor
        if (rank, size) == (0, 2):
            assert torch_memory.allocate(64).peers == (tensor, tensor)
            return
        with pytest.raises(RuntimeError, match=f"one of {size} ranks in which this is rank {rank}"):
            torch_memory.allocate(64)
