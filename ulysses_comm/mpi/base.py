"""What a group of MPI ranks is, apart from the collectives: names, numbers, store, end."""

# torch's stubs know other signatures than its bindings have.
# mypy: disable-error-code="override,call-arg"

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch._C._distributed_c10d import Store

from ulysses_comm.mpi.channel import Channel


class MPIGroupBase(dist.ProcessGroup):
    """Answers all that torch.distributed asks of a group before it communicates.

    torch's own answers come from a backend object inside the group; here the group is the backend.
    """

    def __init__(self, channel: Channel, store: Store) -> None:
        super().__init__(channel.rank, channel.size)
        self._channel = channel
        self._communicator = channel.communicator
        self._store = store
        self._description = "undefined"

    @property
    def group_name(self) -> str:
        """The name under which torch's registry finds this group."""
        return self._channel.name

    @property
    def group_desc(self) -> str:
        """What the program called this group."""
        return self._description

    @property
    def communicator(self) -> MPI.Intracomm:
        """The MPI communicator of this group; its own, so other traffic needs another one."""
        return self._communicator

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _set_group_name(self, name: str) -> None:
        self._channel.name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        """Return the name that the backend is registered under."""
        return "ulysses_mpi"

    name = getBackendName

    def rank(self) -> int:
        """Return this process's place in the group."""
        return self._channel.rank

    def size(self) -> int:
        """Return the number of ranks in the group."""
        return self._channel.size

    def get_group_store(self) -> Store:
        """Return the key-value store that the ranks of this group share."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long an operation may take from now on."""
        self._channel.timeout = timeout

    def shutdown(self) -> None:
        """Complete what is under way and give the communicator back."""
        self._channel.close()

    def abort(self) -> None:
        """Refuse further work. MPI has no way to end what is under way but to end the job."""
        if self._channel.failure is None:
            self._channel.fail("it was aborted")
