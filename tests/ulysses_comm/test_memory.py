"""Fresh buffers: like torch.empty, and large ones in host memory ask for huge pages."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ulysses_comm import Workspace, memory
from ulysses_comm.memory import LARGE_BYTES, empty_aligned, empty_buffer

Calls = list[tuple[int, int, int]]


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Record what is asked of the system, which then refuses."""
    calls: Calls = []

    def refuse(address: int, nbytes: int, advice: int) -> int:
        calls.append((address, nbytes, advice))
        return -1

    monkeypatch.setattr(memory, "_madvise", lambda: refuse)
    return calls


@pytest.mark.parametrize("shape", [(), (0, 3), (5, 7), (LARGE_BYTES,)])
def test_a_whole_buffer_is_what_torch_empty_returns(shape: tuple[int, ...], advised: Calls) -> None:
    buffer = empty_buffer(shape, torch.bfloat16)
    expected = torch.empty(shape, dtype=torch.bfloat16)
    assert (buffer.shape, buffer.stride()) == (expected.shape, expected.stride())
    assert (buffer.dtype, buffer.device) == (expected.dtype, expected.device)
    buffer.fill_(3)
    assert (buffer == 3).all(), "a refusal changes nothing"


def test_whole_pages_of_a_large_buffer_are_asked_for(advised: Calls) -> None:
    buffer = empty_buffer((LARGE_BYTES // 4 + 1,), torch.float32)
    ((address, nbytes, _),) = advised
    start, end = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
    assert address % 4096 == 0
    assert nbytes % 4096 == 0
    assert start <= address
    assert address + nbytes <= end, "the memory of others is not ours to advise on"
    assert nbytes > buffer.nbytes - 2 * 65536


@pytest.mark.parametrize("nbytes", [0, 16, LARGE_BYTES - 16, LARGE_BYTES, 9 * LARGE_BYTES + 48])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64], ids=str)
def test_an_aligned_buffer_is_one_too(nbytes: int, dtype: torch.dtype, advised: Calls) -> None:
    shape = (2, nbytes // 2 // dtype.itemsize)
    tensor = empty_aligned(shape, dtype, "cpu")
    assert tensor.shape == shape
    assert tensor.stride() == torch.empty(shape).stride()
    assert tensor.dtype == dtype
    assert tensor._base is None
    tensor.fill_(1)
    assert (tensor == 1).all()


def test_a_large_aligned_buffer_begins_at_a_huge_page(advised: Calls) -> None:
    tensor = empty_aligned((9, LARGE_BYTES), torch.uint8, "cpu")
    assert tensor.data_ptr() % (2 << 20) == 0
    ((address, nbytes, _),) = advised
    storage = tensor.untyped_storage()
    assert address == tensor.data_ptr()
    assert tensor.nbytes <= nbytes
    assert address + nbytes <= storage.data_ptr() + storage.nbytes()


def test_small_buffers_other_devices_and_fake_tensors_are_left_alone(advised: Calls) -> None:
    empty_buffer((LARGE_BYTES - 1,), torch.uint8)
    empty_buffer((LARGE_BYTES,), torch.uint8, "meta")
    empty_aligned((LARGE_BYTES - 1,), torch.uint8, "cpu")
    empty_aligned((LARGE_BYTES,), torch.uint8, "meta")
    with FakeTensorMode():
        empty_buffer((LARGE_BYTES,), torch.uint8)
    assert advised == []


def test_a_workspace_asks_once_for_each_buffer_that_it_makes(advised: Calls) -> None:
    workspace = Workspace()
    for _ in range(3):
        workspace.take((LARGE_BYTES,), torch.uint8, "cpu")
    assert len(advised) == workspace.allocations == 1


def test_a_system_without_madvise_serves_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert memory._madvise.__wrapped__() is None
    monkeypatch.setattr(memory, "_madvise", lambda: None)
    assert empty_buffer((LARGE_BYTES,), torch.uint8).nbytes == LARGE_BYTES


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(),
    reason="needs a Linux kernel with transparent huge pages",
)
def test_the_kernel_takes_the_wish() -> None:
    buffer = empty_buffer((8 * LARGE_BYTES,), torch.uint8)
    middle = buffer.data_ptr() + buffer.nbytes // 2
    flags: list[str] = []
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if "-" in name and not name.endswith(":"):
            first, last = (int(part, 16) for part in name.split("-"))
            inside = first <= middle < last
        elif inside and name == "VmFlags:":
            flags = rest.split()
    assert "hg" in flags, "the mapping is not marked for huge pages"


def sent_to_another_process(workspace: Workspace) -> Workspace:
    received: Workspace = pickle.loads(pickle.dumps(workspace))
    return received


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, sent_to_another_process])
def test_a_copied_workspace_is_empty(duplicate: Callable[[Workspace], Workspace]) -> None:
    """Whatever holds one, a module as a rule, can be copied and sent to another process."""
    workspace = Workspace(limit_bytes=100)
    workspace.take((10,), torch.float32, "cpu")
    copied = duplicate(workspace)
    assert (copied.nbytes, copied.allocations, workspace.nbytes) == (0, 0, 40)
    copied.take((20,), torch.float32, "cpu")
    copied.take((15,), torch.float32, "cpu")
    assert copied.nbytes == 60, "the limit holds for it too"


@pytest.mark.parametrize("limit", [-1, 1.5, "100", True])
def test_a_limit_that_is_none_is_refused(limit: Any) -> None:
    with pytest.raises(ValueError, match="limit_bytes"):
        Workspace(limit_bytes=limit)
