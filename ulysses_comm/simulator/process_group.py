"""A simulated rank's process group, as torch.distributed sees it."""

# torch's stubs give these methods overloads, and other names in every second version; at run time
# the methods of a Python subclass are looked up by name alone.
# mypy: disable-error-code="override,assignment,call-arg"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ulysses_comm.simulator import collectives
from ulysses_comm.simulator.rendezvous import Call, Group

BACKEND = "ulysses_sim"


class SimulatedProcessGroup(dist.ProcessGroup):
    """One rank's handle of a simulated group.

    torch.distributed accepts it wherever it takes a group. Only the thread of its rank may use it.
    """

    def __init__(self, group: Group, rank: int, registered_name: str) -> None:
        super().__init__(rank, group.size)
        self._group = group
        self._rank = rank
        self._name = registered_name

    def rank(self) -> int:
        """Rank of this process group's owner within the group."""
        return self._rank

    def size(self) -> int:
        """Number of ranks in the group."""
        return self._group.size

    def name(self) -> str:
        """Name of the backend."""
        return BACKEND

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """Name of the backend."""
        return BACKEND

    @property
    def group_name(self) -> str:
        """Name under which torch's registry knows this rank's group."""
        return self._name

    def __repr__(self) -> str:
        return f"SimulatedProcessGroup(rank {self._rank} of {self._group})"

    def record_copied_bytes(self, nbytes: int, *, after: bool) -> None:
        """Book payload bytes that were copied outside the collective.

        Args:
            nbytes: Number of bytes.
            after: False books them on this rank's next collective, True on its last one.
        """
        rank = self._group.ranks[self._rank]
        self._group.recorder.record_copied_bytes(rank, nbytes, after=after)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> dist.Work:
        """Send slices of dimension 0 of `input`, receive into slices of dimension 0 of `output`."""
        call = collectives.all_to_all_single_call(
            self._rank, self._group.size, output, input, output_split_sizes, input_split_sizes
        )
        call.async_op = _is_async(opts)
        return self._group.issue(collectives.ALL_TO_ALL_SINGLE, call)

    # torch 2.11 and 2.12 call it by the old name.
    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait for every rank of the group."""
        call = Call(self._rank, (), [], [], async_op=_is_async(opts))
        return self._group.issue(collectives.BARRIER, call)


def _is_async(opts: Any) -> bool:
    return bool(getattr(opts, "asyncOp", False))
