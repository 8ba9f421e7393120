"""A simulated rank's process group, as torch.distributed sees it."""

# torch's stubs give these methods overloads, and other names in every second version; at run time
# the methods of a Python subclass are looked up by name alone.
# mypy: disable-error-code="override,assignment,call-arg"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ulysses_comm.simulator import moves, reductions, routes
from ulysses_comm.simulator.arguments import require_count
from ulysses_comm.simulator.messages import Mailbox
from ulysses_comm.simulator.rendezvous import Call, Group, Operation
from ulysses_comm.simulator.store import SimulatedStore
from ulysses_comm.simulator.work import BatchWork, SimulatedWork, Transfer

BACKEND = "ulysses_sim"

Tensors = Sequence[torch.Tensor]


class SimulatedProcessGroup(dist.ProcessGroup):
    """One rank's handle of a simulated group; torch.distributed takes it like any other group.

    Only the thread of its rank may use it. Collectives have the names that torch.distributed calls:
    up to torch 2.12 some are named after their C++ ancestors, from 2.13 on after their Python form.
    """

    def __init__(
        self, group: Group, mailbox: Mailbox, store: SimulatedStore, rank: int, name: str
    ) -> None:
        super().__init__(rank, group.size)
        self._group = group
        self._mailbox = mailbox
        self._store = store
        self._rank = rank
        self._registered_name = name
        self._batch: list[SimulatedWork] | None = None

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
        return self._registered_name

    def get_group_store(self) -> SimulatedStore:
        """Return the store that the ranks of this group share; waiting on it is in lock step."""
        return self._store

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

    # Moves

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> dist.Work | None:
        """Send slices of dimension 0 of `input`, receive into slices of dimension 0 of `output`."""
        call = moves.all_to_all_single(
            self._rank, self._group.size, output, input, output_split_sizes, input_split_sizes
        )
        return self._issue(moves.ALL_TO_ALL_SINGLE, call, opts)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> dist.Work | None:
        """Send one tensor to every rank and receive one from every rank."""
        call = routes.all_to_all(self._rank, self._group.size, outputs, inputs)
        return self._issue(routes.ALL_TO_ALL, call, opts)

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> dist.Work | None:
        """Collect every rank's `input`, one after another, in `output`."""
        return self.all_gather_single_coalesced([output], [input], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work | None:
        """Do several `all_gather_single` at once."""
        call = moves.all_gather_into_tensor(self._rank, self._group.size, outputs, inputs)
        return self._issue(moves.ALL_GATHER_INTO_TENSOR, call, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> dist.Work | None:
        """Collect every rank's input in a list."""
        require_count(
            "all_gather", "output lists", [tensors[0] for tensors in outputs], len(inputs)
        )
        call = routes.all_gather(self._rank, self._group.size, outputs, inputs)
        return self._issue(routes.ALL_GATHER, call, opts)

    def allgather_coalesced(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> dist.Work | None:
        """Collect every rank's list of inputs; `outputs` holds one list per rank."""
        per_input = [list(tensors) for tensors in zip(*outputs, strict=True)]
        return self.allgather(per_input, inputs, opts)

    def gather(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> dist.Work | None:
        """Collect every rank's input on the root."""
        call = routes.gather(self._rank, self._group.size, opts.rootRank, outputs, inputs)
        return self._issue(routes.GATHER, call, opts)

    def scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None
    ) -> dist.Work | None:
        """Send one tensor from the root to every rank."""
        call = routes.scatter(self._rank, self._group.size, opts.rootRank, outputs, inputs)
        return self._issue(routes.SCATTER, call, opts)

    def broadcast(self, tensors: Tensors, opts: Any = None) -> dist.Work | None:
        """Send the root's tensors to every rank."""
        call = moves.broadcast(self._rank, opts.rootRank, tensors)
        return self._issue(moves.BROADCAST, call, opts)

    def barrier(self, opts: Any = None) -> dist.Work | None:
        """Wait for every rank of the group."""
        return self._issue(moves.BARRIER, moves.barrier(self._rank), opts)

    # Reductions

    def allreduce(self, tensors: Tensors, opts: Any = None) -> dist.Work | None:
        """Combine every rank's tensors, in place."""
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        return self._issue(
            reductions.ALL_REDUCE, reductions.all_reduce(self._rank, tensors, op), opts
        )

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any = None) -> dist.Work | None:
        """Combine every rank's tensors on the root; the other ranks' tensors stay as they are."""
        call = reductions.reduce(self._rank, opts.rootRank, tensors, opts.reduceOp)
        return self._issue(reductions.REDUCE, call, opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> dist.Work | None:
        """Combine every rank's `input`; rank r keeps the r-th part."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work | None:
        """Do several `reduce_scatter_single` at once."""
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        call = reductions.reduce_scatter_tensor(self._rank, self._group.size, outputs, inputs, op)
        return self._issue(reductions.REDUCE_SCATTER_TENSOR, call, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(
        self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any = None
    ) -> dist.Work | None:
        """Combine every rank's list of tensors; rank r keeps the r-th."""
        op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        call = reductions.reduce_scatter(self._rank, self._group.size, outputs, inputs, op)
        return self._issue(reductions.REDUCE_SCATTER, call, opts)

    # Messages

    def send(self, tensors: Tensors, destination: int, tag: int = 0) -> dist.Work | None:
        """Send a tensor to a rank of the group."""
        call = Call(self._rank, (), list(tensors), [], async_op=True)
        return self._post(call, sends=True, peer=destination, tag=tag)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> dist.Work | None:
        """Receive a tensor from a rank of the group."""
        call = Call(self._rank, (), [], list(tensors), async_op=True)
        return self._post(call, sends=False, peer=source, tag=tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> dist.Work | None:
        """Receive the tensor that was sent first; the handle's `source_rank()` says by whom."""
        call = Call(self._rank, (), [], list(tensors), async_op=True)
        return self._post(call, sends=False, peer=None, tag=tag)

    # Batches of calls, which torch calls coalescing

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        works, self._batch = self._batch, None
        return BatchWork(works or [])

    # What torch asks of every group

    def shutdown(self) -> None:
        """Do nothing: a simulated group holds nothing to let go."""

    def abort(self) -> None:
        """Do nothing: a simulated group holds nothing to let go."""

    def set_timeout(self, timeout: object) -> None:
        """Do nothing: nothing here times out."""

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return self._group.calls_so_far(self._rank)

    def monitored_barrier(self, *args: object, **kwargs: object) -> dist.Work | None:
        """Wait for every rank; a missing one is reported in any case."""
        return self.barrier()

    def split_group(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse: torch only splits groups of backends that are written in C++."""
        raise NotImplementedError(
            "a simulated group cannot be split; inside simulate_world, torch.distributed.new_group "
            "makes sub-groups"
        )

    def merge_remote_group(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse: simulated groups know no other processes."""
        raise NotImplementedError("a simulated group cannot be merged with another one")

    def _issue(self, operation: Operation, call: Call, opts: Any) -> SimulatedWork | None:
        call.async_op = self._batch is not None or bool(getattr(opts, "asyncOp", False))
        work = SimulatedWork(self._group, self._group.meet(operation, call), call)
        if self._batch is None and not call.async_op:
            work.wait()
        return self._unless_in_batch(work)

    def _post(self, call: Call, *, sends: bool, peer: int | None, tag: int) -> SimulatedWork | None:
        transfer: Transfer = self._mailbox.post(call, sends=sends, peer=peer, tag=tag)
        return self._unless_in_batch(SimulatedWork(self._group, transfer, call))

    def _unless_in_batch(self, work: SimulatedWork) -> SimulatedWork | None:
        if self._batch is None:
            return work
        # Not returned: torch would wait for it at once, while the batch is still open.
        self._batch.append(work)
        return None
