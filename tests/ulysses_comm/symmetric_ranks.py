"""Gloo ranks that exchange through symmetric memory: files that all of them map, kernels under
Triton's interpreter. The protocol runs as on GPUs, slots, signals and all, but for time-outs."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.bits import random_bits
from tests.ranks import run_ranks
from ulysses_comm.symmetric import choice
from ulysses_comm.symmetric.ask import ask_all
from ulysses_comm.symmetric.memory import Block
from ulysses_comm.symmetric.state import GroupState


class FileMemory:
    """Symmetric memory out of files that every rank maps."""

    def __init__(self, group: dist.ProcessGroup, folder: str) -> None:
        self._group, self._folder, self._numbers = group, Path(folder), itertools.count()

    def allocate(self, nbytes: int) -> Block:
        number = next(self._numbers)
        paths = [self._folder / f"block-{number}-{r}" for r in range(self._group.size())]
        with open(paths[self._group.rank()], "wb") as file:
            file.truncate(nbytes)
        ask_all(self._group, nbytes)
        peers = tuple(self._map(path, nbytes) for path in paths)
        own = self._map(paths[self._group.rank()], nbytes)
        return Block(own, peers, tuple(peer.data_ptr() for peer in peers), peers)

    @staticmethod
    def _map(path: Path, nbytes: int) -> torch.Tensor:
        return torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)


def use_files(group: dist.ProcessGroup, folder: str, *, slots: int = 3) -> GroupState:
    """Let a group exchange through files from now on."""
    from triton.runtime import interpreter

    # Assertions of kernels count, as traps do on a GPU.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(debug=True)
    state = GroupState(group, torch.device("cpu"), FileMemory(group, folder), slots, 60.0)
    ask_all(group, "ready")
    choice.install_state(group, state, "the test brought its memory")
    return state


@contextmanager
def collectively(group: dist.ProcessGroup) -> Iterator[None]:
    """Exchange through the group's own collective for a while."""
    kept = choice._CHOSEN.pop(group)
    try:
        yield
    finally:
        choice._CHOSEN[group] = kept


def both(group: dist.ProcessGroup, exchange: Callable[[], Any]) -> tuple[Any, Any]:
    """Return what an exchange gives through symmetric memory, and collectively."""
    ours = exchange()
    with collectively(group):
        theirs = exchange()
    return ours, theirs


def run_interpreted(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """Run on gloo ranks that interpret Triton kernels."""
    environment = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return run_ranks(function, world_size, *args, environment=environment, timeout=100.0)


def bits(shape: tuple[int, ...], dtype: torch.dtype, rank: int, number: int = 0) -> torch.Tensor:
    """Any bits, NaNs and infinities among them; others on every rank."""
    return random_bits(shape, dtype, seed=100 * number + rank)


def folder_of(path: Path) -> str:
    """A folder for one run's files."""
    folder = path / f"memory-{os.getpid()}"
    folder.mkdir(exist_ok=True)
    return str(folder)
