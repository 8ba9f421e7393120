"""A workspace hands a buffer out again once nothing refers to it, and keeps within its limit."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
import torch.distributed as dist

from tests.bits import assert_same_bits
from ulysses_comm import (
    Workspace,
    scatter_heads_gather_seqlen,
    scatter_seqlen_gather_heads,
    simulate,
    transfer,
    workspace,
)
from ulysses_comm.memory import LARGE_BYTES
from ulysses_comm.workspace import spare_buffers


def take(kept: Workspace, nbytes: int) -> torch.Tensor:
    return kept.take((nbytes,), torch.uint8, "cpu")


def test_a_buffer_comes_back_once_nothing_refers_to_it() -> None:
    kept = Workspace()
    first = kept.take((2, 8), torch.float32, "cpu")
    address = first.data_ptr()
    view = first[1:]
    del first
    other = kept.take((4, 4), torch.float32, "cpu")
    assert other.data_ptr() != address, "a view still reads it"
    del view
    again = kept.take((32,), torch.bfloat16, "cpu")
    assert again.data_ptr() == address
    assert kept.allocations == 2
    assert kept.nbytes == 128


def test_what_autograd_saved_is_not_handed_out() -> None:
    kept = Workspace()
    buffer = kept.take((8,), torch.float32, "cpu").fill_(3)
    weight = torch.ones(8, requires_grad=True)
    product = weight * buffer
    del buffer
    kept.take((8,), torch.float32, "cpu").fill_(5)
    product.sum().backward()
    assert (weight.grad == 3).all()


def test_what_inference_mode_used_serves_autograd_afterwards() -> None:
    kept = Workspace()
    with torch.inference_mode():
        kept.take((8,), torch.float32, "cpu").fill_(1)
    weight = torch.ones(8, requires_grad=True)
    (weight * kept.take((8,), torch.float32, "cpu").fill_(2)).sum().backward()
    assert (weight.grad == 2).all()
    assert kept.allocations == 1
    with torch.inference_mode():
        assert (kept.take((8,), torch.float32, "cpu").fill_(3) == 3).all()


def test_a_buffer_changes_shape_and_dtype_from_one_use_to_the_next() -> None:
    kept = Workspace()
    address = take(kept, 96).data_ptr()
    for shape, dtype in [
        ((4, 6), torch.float32),
        ((6, 4), torch.float32),
        ((6, 8), torch.bfloat16),
    ]:
        for _ in range(2):
            tensor = kept.take(shape, dtype, "cpu")
            assert (tensor.shape, tensor.dtype) == (shape, dtype)
            assert tensor.is_contiguous()
            assert tensor.data_ptr() == address
            del tensor
    assert kept.allocations == 1


def test_only_a_buffer_of_the_same_size_and_device_is_handed_out() -> None:
    kept = Workspace()
    del_later = take(kept, 64)
    del del_later
    take(kept, 63)
    kept.take((64,), torch.uint8, "meta")
    assert kept.allocations == 3


def test_a_limit_lets_go_of_what_was_unused_for_longest() -> None:
    kept = Workspace(limit_bytes=100)
    for nbytes in (40, 30, 20):
        take(kept, nbytes)
    take(kept, 40)  # now the most recent
    take(kept, 25)  # in the place of 30
    assert kept.nbytes == 85
    assert kept.allocations == 4
    take(kept, 40), take(kept, 20), take(kept, 25)
    assert kept.allocations == 4
    take(kept, 30)
    assert kept.allocations == 5


def test_a_limit_holds_for_buffers_in_use_and_for_ones_beyond_it() -> None:
    kept = Workspace(limit_bytes=100)
    held = [take(kept, 60).fill_(1), take(kept, 61).fill_(2)]
    assert kept.nbytes == 60, "the second could not be kept"
    huge = take(kept, 1000).fill_(3)
    assert kept.nbytes <= 100
    assert [int(t[0]) for t in (*held, huge)] == [1, 2, 3]


def test_lengths_that_keep_changing_stay_within_the_limit() -> None:
    kept = Workspace(limit_bytes=5000)
    for nbytes in range(1000, 2000):
        take(kept, nbytes)
        assert kept.nbytes <= 5000


def test_threads_never_get_the_same_buffer() -> None:
    kept = Workspace()
    wrong = []

    def work(mark: int) -> None:
        for _ in range(300):
            buffer = take(kept, 256).fill_(mark)
            if not (buffer == mark).all():
                wrong.append(mark)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert kept.allocations <= 8


def test_clear_lets_go_and_leaves_tensors_alone() -> None:
    kept = Workspace()
    buffer = take(kept, 16).fill_(7)
    kept.clear()
    assert kept.nbytes == 0
    take(kept, 16).fill_(8)
    assert (buffer == 7).all()


@pytest.mark.parametrize("tracked", [False, True])
def test_a_group_keeps_large_buffers_for_exchanges_without_a_workspace(
    tracked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ulysses_comm.memory.LARGE_BYTES", 1)
    rounds, steady = 8, 6

    def step(group: dist.ProcessGroup) -> list[int]:
        rank, allocations, held = group.rank(), [], []
        inputs = [torch.full((3, 4, 8), 10.0 * rank + i) for i in range(3)]
        for number in range(rounds):
            leaves = [tensor.clone().requires_grad_(tracked) for tensor in inputs]
            results = scatter_heads_gather_seqlen(leaves, (3, 3), group)
            back = [scatter_seqlen_gather_heads(r.contiguous(), (3, 3), group) for r in results]
            for tensor, result in zip(inputs, back, strict=True):
                assert_same_bits(result.detach(), tensor)
            if tracked:
                torch.autograd.backward(back, [torch.ones_like(b) * (number + 1) for b in back])
                assert all((leaf.grad == number + 1).all() for leaf in leaves)
            if number >= steady:
                held.append(back)
            del leaves, results, back
            allocations.append(spare_buffers(group).allocations)
        for backs in held:  # kept results are not overwritten by later rounds
            for tensor, result in zip(inputs, backs, strict=True):
                assert_same_bits(result.detach(), tensor)
        return allocations

    for allocations in simulate(2, step).results:
        # The simulator may hold on to what was sent for a moment longer: one more of each buffer.
        assert 0 < allocations[steady - 1] <= 2 * allocations[0], "a steady loop allocates"


def test_small_buffers_and_other_devices_are_not_kept() -> None:
    taken = transfer.Buffers()
    group = dist.ProcessGroup(0, 1)
    taken.take((LARGE_BYTES - 1,), torch.uint8, torch.device("cpu"), group)
    taken.take((LARGE_BYTES,), torch.uint8, torch.device("meta"), group)
    taken.take((LARGE_BYTES,), torch.uint8, torch.device("cpu"))
    assert spare_buffers(group).allocations == 0
    taken.take((LARGE_BYTES,), torch.uint8, torch.device("cpu"), group)
    assert spare_buffers(group).nbytes == LARGE_BYTES


def test_what_a_group_keeps_is_limited_and_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "SPARE_BYTES", 3 * LARGE_BYTES)
    group = dist.ProcessGroup(0, 1)
    for extra in range(6):
        spare_buffers(group).take((LARGE_BYTES + extra,), torch.uint8, "cpu")
    assert 0 < spare_buffers(group).nbytes <= 3 * LARGE_BYTES
    kept = weakref.ref(spare_buffers(group))
    del group
    gc.collect()
    assert kept() is None
