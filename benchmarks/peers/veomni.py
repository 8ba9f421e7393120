"""VeOmni: its exchange on (tokens, heads, head_dim) and on a batch of it."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.peers.way import OUTPUT, QKV, Missing, Peer, Way, version_of

_MODULE = "veomni.distributed.sequence_parallel.ulysses"
_BARE = ("veomni", "veomni.utils", "veomni.distributed", "veomni.distributed.sequence_parallel")


def load(dims: int = 3) -> Peer:
    """Return the peer, for tensors of 3 or of 4 dimensions: it has another path for each.

    Raises:
        Missing: If VeOmni is not installed or does not import.
    """
    version = version_of("veomni")
    try:
        ulysses, bare = _import_exchange()
    except Exception as error:
        raise Missing(f"veomni {version} does not import: {error}") from error
    seq, heads = (0, 1) if dims == 3 else (1, 2)

    def scatter_heads(
        tensors: Sequence[torch.Tensor], _: Sequence[int], group: dist.ProcessGroup
    ) -> list[torch.Tensor]:
        return [
            ulysses.gather_seq_scatter_heads(tensor, seq, heads, group=group) for tensor in tensors
        ]

    def scatter_seqlen(
        tensors: Sequence[torch.Tensor], _: Sequence[int], group: dist.ProcessGroup
    ) -> list[torch.Tensor]:
        return [ulysses.gather_heads_scatter_seq(tensor, heads, seq, group) for tensor in tensors]

    name, takes = f"veomni {dims}-D", "shd" if dims == 3 else "bshd"
    calls = f"{_MODULE}.gather_seq_scatter_heads and gather_heads_scatter_seq, {dims}-D tensors"
    return Peer(
        name,
        "veomni",
        version,
        calls + (", imported without the package's start-up" if bare else ""),
        (Way(name, QKV, scatter_heads, takes), Way(name, OUTPUT, scatter_seqlen, takes)),
    )


@functools.cache
def _import_exchange() -> tuple[Any, bool]:
    """Import the module of the exchange, and say whether it took empty packages around it.

    `import veomni` imports a training framework, its model zoo and the transformers version that
    these were written for. The exchange needs none of it, so where that import fails, its module
    is imported from between packages that have a path and no content.
    """
    # Asked first: the import below leaves half a package behind where it fails.
    found = importlib.util.find_spec("veomni")
    try:
        return importlib.import_module(_MODULE), False
    except Exception:
        if found is None or not found.submodule_search_locations:
            raise
    root = Path(next(iter(found.submodule_search_locations)))
    for name in [name for name in sys.modules if name.partition(".")[0] == "veomni"]:
        del sys.modules[name]
    for name in _BARE:
        package = types.ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    return importlib.import_module(_MODULE), True
