"""Bytes of tensors alive at a time, on any device, and bytes of a mapped file that were read."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Follows every storage that an operation returns, from then until it is freed.

    What existed before, such as weights and inputs, does not count; nor does scratch memory inside
    an operation.

    Attributes:
        live: Bytes alive now.
        peak: The most bytes alive at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        before = {id(t.untyped_storage()) for t in _tensors((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if id(storage) not in self._known and id(storage) not in before:
                self._follow(storage)
        return result

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = id(storage), storage.nbytes()
        self._known.add(key)
        self.live += nbytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key, nbytes)

    def _forget(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.live -= nbytes


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def resident_bytes(path: Path) -> int:
    """Bytes of a mapped file that this process has touched."""
    smaps = Path("/proc/self/smaps")
    if not smaps.exists():
        pytest.skip("needs /proc/self/smaps to see which pages of a mapping were read")
    total, inside = 0, False
    for line in smaps.read_text().splitlines():
        if "-" in line.split(maxsplit=1)[0]:
            inside = line.endswith(str(path))
        elif inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total
