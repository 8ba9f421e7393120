"""Collectives that move slices of one tensor per rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ulysses_comm.simulator import arguments
from ulysses_comm.simulator.arguments import nbytes
from ulysses_comm.simulator.rendezvous import Call, Operation
from ulysses_comm.simulator.text import dtype_name

Tensors = Sequence[torch.Tensor]


def concatenate_into(target: torch.Tensor, pieces: Tensors) -> None:
    """Fill `target`, in memory order, with the elements of `pieces` one after another."""
    flat = target.view(-1)
    same_device = all(piece.device == target.device for piece in pieces)
    if same_device and all(
        piece.untyped_storage().data_ptr() != target.untyped_storage().data_ptr()
        for piece in pieces
    ):
        torch.cat([piece.reshape(-1) for piece in pieces], out=flat)
        return
    start = 0
    for piece in pieces:
        place = flat[start : start + piece.numel()]
        start += piece.numel()
        # A piece may lie where it belongs already: an all-gather out of its own output.
        if place.data_ptr() != piece.data_ptr():
            place.copy_(piece.reshape(-1))


def all_to_all_single(
    rank: int,
    size: int,
    output: torch.Tensor,
    input: torch.Tensor,
    output_splits: Sequence[int] | None,
    input_splits: Sequence[int] | None,
) -> Call:
    """Check one rank's arguments of all_to_all_single."""
    name = "all_to_all_single"
    arguments.require_same_dtype(name, [output, input])
    arguments.require_dense(name, output=output, input=input)
    received = arguments.row_counts(f"{name}: output", output, output_splits, size)
    sent = arguments.row_counts(f"{name}: input", input, input_splits, size)
    if output.shape[1:].numel() != input.shape[1:].numel():
        raise ValueError(
            f"{name}: rows of output and input must hold as many elements, got shapes "
            f"{tuple(output.shape)} and {tuple(input.shape)}"
        )
    if input.untyped_storage().data_ptr() == output.untyped_storage().data_ptr():
        arguments.refuse_overlap(name, [input], [output])
    facts = (dtype_name(input.dtype), tuple(input.shape[1:]), input.device.type)
    return Call(rank, facts, [input], [output], extra=(received, sent))


def _row_disagreements(calls: Sequence[Call], ranks: Sequence[int]) -> list[str]:
    lines = []
    for receiver, call in enumerate(calls):
        expected = call.extra[0]
        offered = [sender.extra[1][receiver] for sender in calls]
        if offered != expected:
            lines += [
                f"rank {ranks[source]} sends {rows} rows to rank {ranks[receiver]}, which expects "
                f"{expected[source]}"
                for source, rows in enumerate(offered)
                if rows != expected[source]
            ]
    return lines


def _move_rows(calls: Sequence[Call]) -> None:
    pieces = [call.sends[0].split(call.extra[1]) for call in calls]
    row = calls[0].sends[0].shape[1:]
    for receiver, call in enumerate(calls):
        target = call.targets[0]
        own = [piece[receiver] for piece in pieces]
        if target.shape[1:] == row and all(piece.device == target.device for piece in own):
            torch.cat(own, out=target)
        else:
            concatenate_into(target, own)


def _sent_rows(calls: Sequence[Call]) -> list[list[int]]:
    send = calls[0].sends[0]
    row = send.shape[1:].numel() * send.element_size()
    return [[count * row for count in call.extra[1]] for call in calls]


ALL_TO_ALL_SINGLE = Operation(
    "all_to_all_single",
    ("dtype", "shape of a row", "device"),
    _move_rows,
    _sent_rows,
    _row_disagreements,
)


def all_gather_into_tensor(rank: int, size: int, outputs: Tensors, inputs: Tensors) -> Call:
    """Check one rank's arguments of all_gather_into_tensor, or of several coalesced ones."""
    name = "all_gather_into_tensor"
    arguments.require_count(name, "output list", outputs, len(inputs))
    for output, input in zip(outputs, inputs, strict=True):
        arguments.require_same_dtype(name, [output, input])
        arguments.require_dense(name, output=output, input=input)
        arguments.require_times(name, ("output", output), ("input", input), size)
    return Call(rank, arguments.facts_of(inputs), list(inputs), list(outputs))


def _move_gathered(calls: Sequence[Call]) -> None:
    for k in range(len(calls[0].sends)):
        pieces = [call.sends[k] for call in calls]
        for call in calls:
            concatenate_into(call.targets[k], pieces)


def _sent_gathered(calls: Sequence[Call]) -> list[list[int]]:
    return [[sum(map(nbytes, call.sends))] * len(calls) for call in calls]


ALL_GATHER_INTO_TENSOR = Operation(
    "all_gather_into_tensor", ("dtype", "shape", "device"), _move_gathered, _sent_gathered
)


def broadcast(rank: int, root: int, tensors: Tensors) -> Call:
    """Check one rank's arguments of broadcast, or of several coalesced ones."""
    arguments.require_dense_in_any_order("broadcast", tensors)
    sends, receives = (list(tensors), []) if rank == root else ([], list(tensors))
    return Call(rank, (*arguments.facts_of(tensors), root), sends, receives)


def _move_broadcast(calls: Sequence[Call]) -> None:
    root = next(call for call in calls if call.sends)
    for call in calls:
        for target, send in zip(call.targets, root.sends, strict=False):
            target.copy_(send)


def _sent_broadcast(calls: Sequence[Call]) -> list[list[int]]:
    return [
        [sum(map(nbytes, call.sends)) if other is not call else 0 for other in calls]
        for call in calls
    ]


BROADCAST = Operation(
    "broadcast", ("dtype", "shape", "device", "root"), _move_broadcast, _sent_broadcast
)


def barrier(rank: int) -> Call:
    """Return one rank's call of barrier."""
    return Call(rank, (), [], [])


def _move_nothing(calls: Sequence[Call]) -> None:
    pass


def _sent_nothing(calls: Sequence[Call]) -> list[list[int]]:
    return [[0] * len(calls) for _ in calls]


BARRIER = Operation("barrier", (), _move_nothing, _sent_nothing)
