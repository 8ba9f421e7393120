"""MPI as a process group: the methods that torch.distributed calls, each one or more MPI calls."""

# torch's stubs give these methods overloads, and other names in every second version; at run time
# the methods of a Python subclass are looked up by name alone.
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from mpi4py import MPI

from ulysses_comm.mpi.base import MPIGroupBase
from ulysses_comm.mpi.buffers import (
    byte_types,
    count_rows,
    memory,
    overlap,
    tensors_as_types,
    vector,
)
from ulysses_comm.mpi.channel import MPIWork
from ulysses_comm.mpi.checks import check, check_cpu, check_multiple, row_counts
from ulysses_comm.mpi.reductions import ELEMENTS_AT_ONCE, Reduction

Tensors = Sequence[torch.Tensor]


class MPIProcessGroup(MPIGroupBase):
    """A torch.distributed process group of CPU tensors over an MPI communicator.

    Every operation starts at once and returns a handle; `dist.*` waits on it unless told not to.
    Contiguous tensors are sent from and received into the memory they lie in, as bytes, whatever
    their dtype.
    """

    # Moves of bytes.

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> MPIWork:
        """Send rows of `input` to each rank and receive rows of `output` from each."""
        what = "all_to_all_single"
        receives = row_counts(what, "output", output, output_split_sizes, self.size())
        sends = row_counts(what, "input", input, input_split_sizes, self.size())
        if output.dtype != input.dtype or output.shape[1:].numel() != input.shape[1:].numel():
            raise ValueError(
                f"{what}: output is {output.dtype} {list(output.shape)}, input {input.dtype} "
                f"{list(input.shape)}: expected one dtype and rows of equal size."
            )
        source = input.clone() if overlap(output, input) else input
        rows = count_rows(
            input.shape[1:].numel() * input.element_size(), sends=sends, receives=receives
        )

        def begin() -> list[MPI.Request]:
            with byte_types(rows.unit) as (row,):
                request = self._communicator.Ialltoallv(
                    vector(source, rows.sends, row), vector(output, rows.receives, row)
                )
            return [request]

        return self._channel.start(what, begin, keep=(source, output), results=[output])

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> MPIWork:
        """Send one tensor to each rank and receive one from each, of any sizes."""
        return self._exchange("all_to_all", inputs, outputs)

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> MPIWork:
        """Gather one tensor of each rank into one, in rank order."""
        return self.all_gather_single_coalesced([output], [input], opts)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> MPIWork:
        """Gather several tensors, each into one of its own."""
        what = "all_gather_single"
        for output, input in zip(outputs, inputs, strict=True):
            check(what, output=output, input=input)
            check_multiple(what, output, input, self.size())

        def begin() -> list[MPI.Request]:
            requests = []
            for output, input in zip(outputs, inputs, strict=True):
                own_place = output.data_ptr() + self.rank() * input.nbytes
                with byte_types(input.nbytes) as (block,):
                    target = vector(output, [1] * self.size(), block)
                    source: Any = [memory(input), 1, block]
                    if input.data_ptr() == own_place:
                        source = MPI.IN_PLACE  # FSDP gathers in place; MPI wants to be told
                    requests.append(self._communicator.Iallgatherv(source, target))
            return requests

        return self._channel.start(what, begin, keep=(outputs, inputs), results=outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> MPIWork:
        """Gather one tensor of each rank into a list, in rank order, of any sizes."""
        return self._exchange("all_gather", [inputs[0]] * self.size(), outputs[0])

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> MPIWork:
        """Gather one tensor of each rank into a list on the root."""
        sends: list[torch.Tensor | None] = [None] * self.size()
        sends[opts.rootRank] = inputs[0]
        receives = outputs[0] if self.rank() == opts.rootRank else [None] * self.size()
        return self._exchange("gather", sends, receives)

    def gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> MPIWork:
        """Gather one tensor of each rank into one on the root, in rank order."""
        pieces: list[list[torch.Tensor]] = []
        if self.rank() == opts.rootRank:
            check("gather_single", output=output)
            check_multiple("gather_single", output, input, self.size())
            pieces = [list(output.view(self.size(), -1).unbind())]
        return self.gather(pieces, [input], opts)

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> MPIWork:
        """Send one tensor of the root's list to each rank."""
        receives: list[torch.Tensor | None] = [None] * self.size()
        receives[opts.rootRank] = outputs[0]
        sends = inputs[0] if self.rank() == opts.rootRank else [None] * self.size()
        return self._exchange("scatter", sends, receives)

    def broadcast(self, tensors: Tensors, opts: Any) -> MPIWork:
        """Send the root's tensors to every rank."""
        carriers = [_carrier("broadcast", tensor) for tensor in tensors]

        def begin() -> list[MPI.Request]:
            requests = []
            for carrier in carriers:
                with byte_types(carrier.nbytes) as (block,):
                    message = [memory(carrier), 1, block]
                    requests.append(self._communicator.Ibcast(message, root=opts.rootRank))
            return requests

        return self._channel.start(
            "broadcast",
            begin,
            keep=carriers,
            results=tensors,
            deliver=partial(_bring_home, carriers, tensors),
        )

    def send(self, tensors: Tensors, destination: int, tag: int) -> MPIWork:
        """Send one tensor to one rank."""
        carrier = _carrier("send", tensors[0])

        def begin() -> list[MPI.Request]:
            with byte_types(carrier.nbytes) as (block,):
                message = [memory(carrier), 1, block]
                return [self._communicator.Isend(message, destination, tag)]

        return self._channel.start("send", begin, keep=[carrier])

    def recv(self, tensors: Tensors, source: int, tag: int) -> MPIWork:
        """Receive one tensor from one rank."""
        carrier = _carrier("recv", tensors[0])

        def begin() -> list[MPI.Request]:
            with byte_types(carrier.nbytes) as (block,):
                message = [memory(carrier), 1, block]
                return [self._communicator.Irecv(message, source, tag)]

        deliver = partial(_bring_home, [carrier], tensors)
        return self._channel.start("recv", begin, keep=[carrier], results=tensors, deliver=deliver)

    def recv_anysource(self, tensors: Tensors, tag: int) -> MPIWork:
        """Receive one tensor from whichever rank sends one; the handle knows which it was."""
        return self.recv(tensors, MPI.ANY_SOURCE, tag)

    def barrier(self, opts: Any = None) -> MPIWork:
        """Wait until every rank is here."""
        return self._channel.start("barrier", lambda: [self._communicator.Ibarrier()], keep=())

    # Reductions.

    def allreduce(self, tensors: Tensors, opts: Any) -> MPIWork:
        """Reduce tensors over the ranks, in place; 16-bit floats are summed in float32."""
        plans = []
        for tensor in tensors:
            check_cpu("all_reduce", tensor)
            reduction = Reduction.plan(tensor.dtype, opts.reduceOp, self.size())
            plans.append((reduction, None, reduction.carry(tensor)))

        def begin() -> list[MPI.Request]:
            return [
                self._communicator.Iallreduce(MPI.IN_PLACE, message, op=reduction.operation)
                for reduction, _, carrier in plans
                for (message,) in reduction.messages(carrier)
            ]

        return self._channel.start(
            "all_reduce",
            begin,
            keep=plans,
            results=tensors,
            deliver=partial(_deliver_each, plans, tensors),
        )

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> MPIWork:
        """Reduce a tensor to the root; on other ranks it stays as it was."""
        check_cpu("reduce", tensors[0])
        reduction = Reduction.plan(tensors[0].dtype, opts.reduceOp, self.size())
        carrier = reduction.carry(tensors[0])
        target = torch.empty_like(carrier)
        is_root = self.rank() == opts.rootRank
        return self._channel.start(
            "reduce",
            partial(self._reduce_to, opts.rootRank, reduction, carrier, target),
            keep=(carrier, target),
            results=tensors,
            deliver=partial(reduction.deliver, target, tensors[0]) if is_root else None,
        )

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any
    ) -> MPIWork:
        """Reduce one tensor and leave each rank its part of the result."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any
    ) -> MPIWork:
        """Reduce several tensors, each into its own part."""
        plans = []
        for output, input in zip(outputs, inputs, strict=True):
            check("reduce_scatter_single", output=output, input=input)
            check_multiple("reduce_scatter_single", input, output, self.size())
            reduction = Reduction.plan(output.dtype, opts.reduceOp, self.size())
            carrier = reduction.carry(input)
            plans.append((reduction, carrier, reduction.landing(output, apart_from=carrier)))
        if any(carrier.numel() > ELEMENTS_AT_ONCE for _, carrier, _ in plans):
            parts = [list(input.view(self.size(), -1).unbind()) for input in inputs]
            return self.reduce_scatter(outputs, parts, opts)

        def begin() -> list[MPI.Request]:
            return [
                self._communicator.Ireduce_scatter(
                    reduction.message(carrier),
                    reduction.message(target),
                    [target.numel()] * self.size(),
                    op=reduction.operation,
                )
                for reduction, carrier, target in plans
            ]

        return self._channel.start(
            "reduce_scatter_single",
            begin,
            keep=plans,
            results=outputs,
            deliver=partial(_deliver_each, plans, outputs),
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> MPIWork:
        """Reduce one tensor per rank, of any sizes, and leave each rank its own.

        One MPI reduction to each rank: nothing has to be made adjacent first.
        """
        plans = []
        for output, parts in zip(outputs, inputs, strict=True):
            check_cpu("reduce_scatter", output)
            reduction = Reduction.plan(output.dtype, opts.reduceOp, self.size())
            carriers = [reduction.carry(part) for part in parts]
            target = reduction.landing(output, apart_from=carriers[self.rank()])
            plans.append((reduction, carriers, target))

        def begin() -> list[MPI.Request]:
            return [
                request
                for reduction, carriers, target in plans
                for root, carrier in enumerate(carriers)
                for request in self._reduce_to(root, reduction, carrier, target)
            ]

        return self._channel.start(
            "reduce_scatter",
            begin,
            keep=plans,
            results=outputs,
            deliver=partial(_deliver_each, plans, outputs),
        )

    def _reduce_to(
        self, root: int, reduction: Reduction, sent: torch.Tensor, received: torch.Tensor
    ) -> list[MPI.Request]:
        """Begin to reduce every rank's `sent` into the root's `received`."""
        operation = reduction.operation
        if self.rank() != root:
            return [
                self._communicator.Ireduce(message, None, op=operation, root=root)
                for (message,) in reduction.messages(sent)
            ]
        return [
            self._communicator.Ireduce(message, target, op=operation, root=root)
            for message, target in reduction.messages(sent, received)
        ]

    def _exchange(
        self,
        what: str,
        sends: Sequence[torch.Tensor | None],
        receives: Sequence[torch.Tensor | None],
    ) -> MPIWork:
        """Send one tensor to each rank and receive one from each; None stands for nothing."""
        sources = [None if tensor is None else _carrier(what, tensor) for tensor in sends]
        targets = [None if tensor is None else _carrier(what, tensor) for tensor in receives]
        own_source, own_target = sources[self.rank()], targets[self.rank()]
        if own_source is not None and own_target is not None and overlap(own_source, own_target):
            # Gathered in place; MPI forbids memory that is sent and received at once.
            sources = [None if source is None else source.clone() for source in sources]

        def begin() -> list[MPI.Request]:
            with tensors_as_types(sources) as sent, tensors_as_types(targets) as received:
                return [self._communicator.Ialltoallw(sent, received)]

        results = [tensor for tensor in receives if tensor is not None]
        landed = [target for target in targets if target is not None]
        return self._channel.start(
            what,
            begin,
            keep=(sources, targets),
            results=results,
            deliver=partial(_bring_home, landed, results),
        )


def _deliver_each(plans: Sequence[tuple[Reduction, Any, torch.Tensor]], outputs: Tensors) -> None:
    for (reduction, _, target), output in zip(plans, outputs, strict=True):
        reduction.deliver(target, output)


def _carrier(what: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return the contiguous tensor that MPI reads or writes for this one: itself if possible."""
    check_cpu(what, tensor)
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _bring_home(carriers: Tensors, tensors: Tensors) -> None:
    for carrier, tensor in zip(carriers, tensors, strict=True):
        home = tensor.detach()
        if carrier.data_ptr() != home.data_ptr():
            with torch.no_grad():
                home.copy_(carrier)
