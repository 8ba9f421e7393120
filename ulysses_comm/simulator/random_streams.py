"""One random stream per rank: torch (CPU, and the GPUs once they run), `random` and `numpy.random`.

The global generators belong to the whole process. Exactly one rank runs at a time, so it is enough
to exchange their state whenever the baton passes. A switch costs about 10 microseconds.
"""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch
from numpy.random import mtrand as numpy_singleton

from ulysses_comm.simulator.streams import initialised_gpu_module


class RandomStreams:
    """The state of every global generator, once per rank and once for the caller.

    Args:
        world_size: Number of ranks.
        seed: None lets every rank start from a copy of the caller's state, as processes that were
            all seeded alike do. A number gives each rank a stream of its own, derived from
            (seed, rank) and therefore the same in every run.

    numpy's generators are exchanged as objects, which is why the second of a pair of normal
    deviates that `numpy.random.randn` keeps for later is forgotten when the baton passes.
    """

    def __init__(self, world_size: int, seed: int | None) -> None:
        gpu = initialised_gpu_module()
        self._gpu_generators: tuple[torch.Generator, ...] = (
            () if gpu is None else tuple(gpu.default_generators)
        )
        self._caller_numpy_state = np.random.get_state(legacy=False)
        self._caller = self._save()
        if seed is None:
            self._states = [self._copy_of_caller() for _ in range(world_size)]
        else:
            self._states = [self._seeded(seed, rank) for rank in range(world_size)]

    def enter(self, rank: int) -> None:
        """Make the stream of `rank` the process's stream."""
        self._load(self._states[rank])

    def leave(self, rank: int) -> None:
        """Keep how far `rank` has come in its stream."""
        self._states[rank] = self._save()

    def restore_caller(self) -> None:
        """Put back what the process had before the simulation."""
        self._load(self._caller)
        np.random.set_state(self._caller_numpy_state)

    def _save(self) -> tuple[Any, ...]:
        return (
            torch.default_generator.get_state(),
            [generator.get_state() for generator in self._gpu_generators],
            random.getstate(),
            numpy_singleton.get_bit_generator(),
        )

    def _load(self, state: tuple[Any, ...]) -> None:
        cpu, gpus, python, bit_generator = state
        torch.default_generator.set_state(cpu)
        for generator, gpu in zip(self._gpu_generators, gpus, strict=True):
            generator.set_state(gpu)
        random.setstate(python)
        numpy_singleton.set_bit_generator(bit_generator)

    def _copy_of_caller(self) -> tuple[Any, ...]:
        cpu, gpus, python, bit_generator = self._caller
        own = type(bit_generator)(0)
        own.state = bit_generator.state
        return cpu, gpus, python, own

    def _seeded(self, seed: int, rank: int) -> tuple[Any, ...]:
        digest = hashlib.sha256(f"ulysses_comm rank stream {seed} {rank}".encode()).digest()
        # 63 bits: torch refuses larger seeds on some devices.
        stream_seed = int.from_bytes(digest[:8], "little") >> 1
        cpu = torch.Generator().manual_seed(stream_seed).get_state()
        gpus = [
            torch.Generator(device=generator.device).manual_seed(stream_seed).get_state()
            for generator in self._gpu_generators
        ]
        return cpu, gpus, random.Random(stream_seed).getstate(), np.random.MT19937(stream_seed)
