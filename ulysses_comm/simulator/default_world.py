"""Make the simulated world torch.distributed's default group, rank by rank, and put it back."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d_bindings
from torch.distributed import distributed_c10d

from ulysses_comm.simulator.process_group import BACKEND, SimulatedProcessGroup
from ulysses_comm.simulator.world import World, current_world

_registered = False


class _WorldPerThread:
    """Stands in for torch's record of groups, with a record of its own for every thread.

    torch 2.11 to 2.14 keep different fields there. They all start empty, so each is made after its
    counterpart: an empty container for a container, 0 for a number, None for anything else.
    """

    def __init__(self, original: Any) -> None:
        vars(self).update(_original=original, _fields=threading.local())

    def __getattr__(self, name: str) -> Any:
        fields = vars(self._fields)
        if name not in fields:
            derived = getattr(type(self._original), name, None)
            if name == "pg_config_info" and isinstance(derived, property):
                assert derived.fget is not None
                return derived.fget(self)
            value = getattr(self._original, name)
            fields[name] = type(value)() if isinstance(value, (dict, list, set, int)) else None
        return fields[name]

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self._fields)[name] = value


@contextlib.contextmanager
def swapped_in() -> Iterator[None]:
    """Hide the process's real groups, if there are any, and give every thread its own."""
    _register_backend()
    # By attribute: torch calls this module variable its extension point.
    module: Any = distributed_c10d
    original = module._world
    excepthook = sys.excepthook
    rng_module = sys.modules.get("torch.distributed.tensor._random")
    rng_tracker = getattr(rng_module, "_rng_tracker", None)
    module._world = _WorldPerThread(original)
    # From now on the registry of group names is a separate one in every thread.
    bindings: Any = c10d_bindings
    bindings._set_thread_isolation_mode(True)
    try:
        yield
    finally:
        bindings._set_thread_isolation_mode(False)
        module._world = original
        module._update_default_pg(original.default_pg)
        # init_process_group wraps it to print the rank.
        sys.excepthook = excepthook
        rng_module = sys.modules.get("torch.distributed.tensor._random")
        if rng_module is not None:
            rng_module._rng_tracker = rng_tracker  # type: ignore[attr-defined]


@contextlib.contextmanager
def initialised(world: World, rank: int) -> Iterator[None]:
    """Initialise torch.distributed in the thread of a rank for the length of a with block."""
    swapped: Any = distributed_c10d
    own = swapped._world
    dist.init_process_group(BACKEND, rank=rank, world_size=world.world_size, store=world.store)
    try:
        yield
    finally:
        # Not if an interrupted run was left behind and the real world is back already.
        if swapped._world is own and dist.is_initialized():
            dist.destroy_process_group()


def _register_backend() -> None:
    global _registered
    if not _registered:
        # Devices that have a backend already: the simulator must not become anyone's default.
        devices = list(dist.Backend.default_device_backend_map)
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=devices)
        _registered = True


def _create(options: Any, _: Any) -> SimulatedProcessGroup:
    world = current_world()
    if world is None:
        raise RuntimeError(
            f"the backend {BACKEND!r} only exists inside ulysses_comm.simulate.simulate_world"
        )
    ranks = list(options.global_ranks_in_group) or list(range(world.world_size))
    name = options.group_id
    rank = options.group_rank
    # A group that is destroyed and made again, by the same name, is another group.
    generation = world.next_generation(ranks[rank], (name, tuple(ranks)))
    key = (name, tuple(ranks), generation)
    return world.process_group(key, name, ranks, rank, name)
