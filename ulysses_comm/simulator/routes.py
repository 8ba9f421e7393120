"""Collectives on lists of tensors: each tensor goes as a whole from one rank to another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from ulysses_comm.simulator import arguments
from ulysses_comm.simulator.arguments import nbytes
from ulysses_comm.simulator.rendezvous import Call, Operation
from ulysses_comm.simulator.text import describe, dtype_name

Tensors = Sequence[torch.Tensor]
# (source, i, destination, j): `sends[i]` of the source goes to `receives[j]` of the destination.
Route = tuple[int, int, int, int]


def _routed(
    name: str, facts: tuple[str, ...], routes: Callable[[Sequence[Call]], Iterator[Route]]
) -> Operation:
    def move(calls: Sequence[Call]) -> None:
        for source, i, destination, j in routes(calls):
            send, target = calls[source].sends[i], calls[destination].targets[j]
            # It may lie where it belongs already: a gather out of its own output.
            if send.data_ptr() != target.data_ptr():
                target.copy_(send)

    def sent(calls: Sequence[Call]) -> list[list[int]]:
        matrix = [[0] * len(calls) for _ in calls]
        for source, i, destination, _ in routes(calls):
            matrix[source][destination] += nbytes(calls[source].sends[i])
        return matrix

    def disagreements(calls: Sequence[Call], ranks: Sequence[int]) -> list[str]:
        return [
            f"rank {ranks[source]} sends {describe(calls[source].sends[i])} to rank "
            f"{ranks[destination]}, which expects "
            f"{describe(calls[destination].receives[j])}"
            for source, i, destination, j in routes(calls)
            if calls[source].sends[i].shape != calls[destination].receives[j].shape
        ]

    return Operation(name, facts, move, sent, disagreements)


def _root(calls: Sequence[Call]) -> int:
    root = calls[0].facts[0]
    assert isinstance(root, int)
    return root


def _all_to_all_routes(calls: Sequence[Call]) -> Iterator[Route]:
    for source in range(len(calls)):
        for destination in range(len(calls)):
            yield source, destination, destination, source


def _gather_routes(calls: Sequence[Call]) -> Iterator[Route]:
    for source in range(len(calls)):
        yield source, 0, _root(calls), source


def _scatter_routes(calls: Sequence[Call]) -> Iterator[Route]:
    for destination in range(len(calls)):
        yield _root(calls), destination, destination, 0


def _all_gather_routes(calls: Sequence[Call]) -> Iterator[Route]:
    size = len(calls)
    for k in range(len(calls[0].sends)):
        for source in range(size):
            for destination in range(size):
                yield source, k, destination, k * size + source


ALL_TO_ALL = _routed("all_to_all", ("dtype", "device"), _all_to_all_routes)
GATHER = _routed("gather", ("root", "dtype", "device"), _gather_routes)
SCATTER = _routed("scatter", ("root", "dtype", "device"), _scatter_routes)
ALL_GATHER = _routed("all_gather", ("inputs", "dtype", "device"), _all_gather_routes)


def all_to_all(rank: int, size: int, outputs: Tensors, inputs: Tensors) -> Call:
    """Check one rank's arguments of all_to_all."""
    name = ALL_TO_ALL.name
    arguments.require_count(name, "output_tensor_list", outputs, size)
    arguments.require_count(name, "input_tensor_list", inputs, size)
    _require_alike(name, [*outputs, *inputs])
    arguments.refuse_overlap(name, inputs, outputs)
    facts = (dtype_name(inputs[0].dtype), inputs[0].device.type)
    return Call(rank, facts, list(inputs), list(outputs))


def gather(rank: int, size: int, root: int, outputs: Sequence[Tensors], inputs: Tensors) -> Call:
    """Check one rank's arguments of gather; only the root has outputs."""
    receives = list(outputs[0]) if outputs else []
    arguments.require_count(GATHER.name, "gather_list", receives, size if rank == root else 0)
    _require_alike(GATHER.name, [*inputs, *receives])
    facts = (root, dtype_name(inputs[0].dtype), inputs[0].device.type)
    return Call(rank, facts, list(inputs), receives)


def scatter(rank: int, size: int, root: int, outputs: Tensors, inputs: Sequence[Tensors]) -> Call:
    """Check one rank's arguments of scatter; only the root has inputs."""
    sends = list(inputs[0]) if inputs else []
    arguments.require_count(SCATTER.name, "scatter_list", sends, size if rank == root else 0)
    _require_alike(SCATTER.name, [*outputs, *sends])
    facts = (root, dtype_name(outputs[0].dtype), outputs[0].device.type)
    return Call(rank, facts, sends, list(outputs))


def all_gather(rank: int, size: int, outputs: Sequence[Tensors], inputs: Tensors) -> Call:
    """Check one rank's arguments of all_gather; for each input, `outputs` has one per rank."""
    for per_rank in outputs:
        arguments.require_count(ALL_GATHER.name, "tensor_list", per_rank, size)
    receives = [tensor for per_rank in outputs for tensor in per_rank]
    _require_alike(ALL_GATHER.name, [*inputs, *receives])
    facts = (len(inputs), dtype_name(inputs[0].dtype), inputs[0].device.type)
    return Call(rank, facts, list(inputs), receives)


def _require_alike(name: str, tensors: Tensors) -> None:
    arguments.require_same_dtype(name, tensors)
    for tensor in tensors:
        arguments.require_dense(name, tensor=tensor)
