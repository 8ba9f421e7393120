"""The registration with torch.distributed, and how a group comes to be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from ulysses_comm.mpi.library import load_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

BACKEND = "ulysses_mpi"
"""The name to give to torch.distributed. Its own "mpi" needs a torch built with MPI."""


@dataclass(frozen=True)
class MPIOptions:
    """What `init_process_group(..., pg_options=...)` takes for this backend.

    Attributes:
        communicator: The ranks of the default group, where these are not all ranks that mpirun
            started.
    """

    communicator: MPI.Intracomm


def register_backend() -> None:
    """Make the backend known to torch.distributed, and start MPI in this process.

    Raises:
        RuntimeError: If mpi4py is not installed, or finds no MPI library.
    """
    load_mpi()
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])


def end_job_after_failure() -> None:
    """Let an uncaught exception of this rank end all ranks, whatever backend they use.

    Otherwise this rank would wait in MPI for the others, and they for this one. `init_distributed`
    under mpirun calls it, and so does every group of this backend.
    """
    load_mpi()
    from ulysses_comm.mpi import exit_hook

    exit_hook.install()


def _create(options: Any, pg_options: object) -> dist.ProcessGroup:
    """Make the group that torch.distributed asks this rank for; its members call together."""
    from ulysses_comm.mpi.channel import Channel
    from ulysses_comm.mpi.process_group import MPIProcessGroup

    world = _world(pg_options)
    members = list(options.global_ranks_in_group) or list(range(options.group_size))
    _check_world(world, members, members[options.group_rank])
    _meet(options.store, options.group_rank, members, options.timeout, options.group_id)
    # Only members call, so it must be this one of MPI's ways to make a communicator.
    included = world.group.Incl(members)
    communicator = world.Create_group(included)
    included.Free()
    channel = Channel(communicator, options.group_id, options.timeout)
    return MPIProcessGroup(channel, options.store)


def _world(pg_options: object) -> MPI.Intracomm:
    """Return the communicator in which torch's global ranks count."""
    from ulysses_comm.mpi.process_group import MPIProcessGroup

    if isinstance(pg_options, MPIOptions):
        return pg_options.communicator
    if pg_options is not None:
        raise ValueError(
            f"pg_options is a {type(pg_options).__name__}: expected ulysses_comm.mpi.MPIOptions "
            f"or None for the backend {BACKEND}."
        )
    if dist.is_initialized() and isinstance(dist.group.WORLD, MPIProcessGroup):
        return dist.group.WORLD.communicator
    world: MPI.Intracomm = load_mpi().COMM_WORLD
    return world


def _check_world(world: MPI.Intracomm, members: Sequence[int], rank: int) -> None:
    if max(members) < world.size and rank == world.rank:
        return
    raise RuntimeError(
        f"torch.distributed calls this process rank {rank} and asks for a group of the ranks "
        f"{list(members)}; MPI calls it rank {world.rank} of {world.size}. Start the program with "
        "the mpirun that belongs to this MPI library and pass MPI's ranks: "
        "ulysses_comm.bootstrap.init_distributed() does."
    )


def _meet(store: Store, rank: int, members: Sequence[int], timeout: timedelta, name: str) -> None:
    """Wait in the store until every member is here: MPI itself would wait without an end.

    Raises:
        ValueError: If the store is one that no other process sees.
        RuntimeError: If a member does not come in time.
    """
    if len(members) == 1:
        return
    shared = store
    while isinstance(shared, PrefixStore):
        shared = shared.underlying_store
    if isinstance(shared, HashStore):
        raise ValueError(
            f"the store of group '{name}' is a HashStore, which the other ranks cannot see: "
            "expected a TCPStore or FileStore. ulysses_comm.bootstrap.init_distributed() opens one."
        )
    store.set(f"ulysses_comm/mpi/here/{rank}", "")
    try:
        store.wait([f"ulysses_comm/mpi/here/{other}" for other in range(len(members))], timeout)
    except RuntimeError as error:
        missing = [
            member
            for other, member in enumerate(members)
            if not store.check([f"ulysses_comm/mpi/here/{other}"])
        ]
        raise RuntimeError(
            f"MPI group '{name}': rank(s) {missing} out of {list(members)} did not call "
            f"init_process_group or new_group within {timeout.total_seconds():g} s. All members "
            "have to, in the same order of groups."
        ) from error
