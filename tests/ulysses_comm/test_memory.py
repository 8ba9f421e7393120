"""Fresh buffers: like torch.empty, and large ones in host memory ask for huge pages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ulysses_comm import Workspace, memory
from ulysses_comm.memory import HUGE_PAGE_BYTES, empty_buffer

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


@pytest.mark.parametrize("shape", [(), (0, 3), (5, 7), (HUGE_PAGE_BYTES,)])
def test_a_buffer_is_what_torch_empty_returns(shape: tuple[int, ...], advised: Calls) -> None:
    buffer = empty_buffer(shape, torch.bfloat16)
    expected = torch.empty(shape, dtype=torch.bfloat16)
    assert (buffer.shape, buffer.stride()) == (expected.shape, expected.stride())
    assert (buffer.dtype, buffer.device) == (expected.dtype, expected.device)
    buffer.fill_(3)
    assert (buffer == 3).all(), "a refusal changes nothing"


def test_whole_pages_of_a_large_buffer_are_asked_for(advised: Calls) -> None:
    buffer = empty_buffer((HUGE_PAGE_BYTES // 4 + 1,), torch.float32)
    ((address, nbytes, _),) = advised
    start, end = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
    assert address % 4096 == 0
    assert nbytes % 4096 == 0
    assert start <= address
    assert address + nbytes <= end, "the memory of others is not ours to advise on"
    assert nbytes > buffer.nbytes - 2 * 65536


def test_small_buffers_other_devices_and_fake_tensors_are_left_alone(advised: Calls) -> None:
    empty_buffer((HUGE_PAGE_BYTES - 1,), torch.uint8)
    empty_buffer((HUGE_PAGE_BYTES,), torch.uint8, "meta")
    with FakeTensorMode():
        empty_buffer((HUGE_PAGE_BYTES,), torch.uint8)
    assert advised == []


def test_a_workspace_asks_once_for_each_buffer_that_it_makes(advised: Calls) -> None:
    workspace = Workspace()
    for _ in range(3):
        workspace.take((HUGE_PAGE_BYTES,), torch.uint8, "cpu")
    assert len(advised) == workspace.allocations == 1


def test_a_system_without_madvise_serves_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert memory._madvise.__wrapped__() is None
    monkeypatch.setattr(memory, "_madvise", lambda: None)
    assert empty_buffer((HUGE_PAGE_BYTES,), torch.uint8).nbytes == HUGE_PAGE_BYTES


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(),
    reason="needs a Linux kernel with transparent huge pages",
)
def test_the_kernel_takes_the_wish() -> None:
    buffer = empty_buffer((8 * HUGE_PAGE_BYTES,), torch.uint8)
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
