"""Which peers there are, and what became of importing them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.peers import deepspeed, diffusers, veomni, yunchang
from benchmarks.peers.way import Missing, Peer

LOADERS: dict[str, Callable[[], Peer]] = {
    "yunchang": yunchang.load,
    "deepspeed": deepspeed.load,
    "veomni 3-D": functools.partial(veomni.load, 3),
    "veomni 4-D": functools.partial(veomni.load, 4),
    "diffusers": diffusers.load,
    "diffusers any": diffusers.load_anything,
}


@dataclass(frozen=True)
class Found:
    """The peers that import here, by name, and why the others do not."""

    peers: dict[str, Peer]
    missing: dict[str, str]


@functools.cache
def find_peers() -> Found:
    """Import every peer that can be imported, once in this process."""
    found = Found({}, {})
    for name, load in LOADERS.items():
        try:
            found.peers[name] = load()
        except Missing as missing:
            found.missing[name] = str(missing)
    return found
