"""What each collective checks and how it moves data."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ulysses_comm.simulator.errors import MismatchError
from ulysses_comm.simulator.rendezvous import Call, Operation


def all_to_all_single_call(
    rank: int,
    size: int,
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
) -> Call:
    """Check one rank's arguments of all_to_all_single.

    Raises:
        ValueError: If the arguments contradict each other on this rank already.
    """
    splits = []
    for role, tensor, given in (
        ("output", output, output_split_sizes),
        ("input", input, input_split_sizes),
    ):
        if tensor.dim() == 0:
            raise ValueError(f"all_to_all_single: {role} has no dimension 0 to split")
        if not tensor.is_contiguous():
            raise ValueError(
                f"all_to_all_single: {role} must be contiguous, got shape {tuple(tensor.shape)} "
                f"with strides {tensor.stride()}"
            )
        splits.append(_row_counts(f"all_to_all_single: {role}", tensor, given, size))
    if output.dtype != input.dtype:
        raise ValueError(f"all_to_all_single: output is {output.dtype}, input {input.dtype}")
    if output.shape[1:].numel() != input.shape[1:].numel():
        raise ValueError(
            f"all_to_all_single: a row of output has {output.shape[1:].numel()} elements "
            f"(shape {tuple(output.shape)}), a row of input {input.shape[1:].numel()} "
            f"(shape {tuple(input.shape)})"
        )
    facts = (input.dtype, tuple(input.shape[1:]), input.device.type)
    return Call(rank, facts, [input], [output], extra=(splits[0], splits[1]))


def _row_counts(
    role: str, tensor: torch.Tensor, given: Sequence[int] | None, size: int
) -> list[int]:
    rows = tensor.shape[0]
    if not given:
        if rows % size:
            raise ValueError(
                f"{role} has {rows} rows, which do not split evenly over {size} ranks: "
                f"pass split sizes"
            )
        return [rows // size] * size
    counts = [int(count) for count in given]
    if len(counts) != size:
        raise ValueError(f"{role} has {len(counts)} split sizes {counts} for {size} ranks")
    if min(counts) < 0 or sum(counts) != rows:
        raise ValueError(
            f"{role} split sizes {counts} add up to {sum(counts)}, its dimension 0 is {rows}"
        )
    return counts


def _check_all_to_all_single(calls: Sequence[Call], title: str, ranks: Sequence[int]) -> None:
    wrong = []
    for receiver, call in enumerate(calls):
        offered = [sender.extra[1][receiver] for sender in calls]
        if offered != call.extra[0]:
            wrong += [
                f"  rank {ranks[source]} sends {sent} rows to rank {ranks[receiver]}, "
                f"which expects {expected}"
                for source, (sent, expected) in enumerate(zip(offered, call.extra[0], strict=True))
                if sent != expected
            ]
    if wrong:
        raise MismatchError(f"split sizes disagree in {title}:\n" + "\n".join(wrong))


def _move_all_to_all_single(calls: Sequence[Call]) -> None:
    pieces = [call.sends[0].detach().split(call.extra[1]) for call in calls]
    for receiver, call in enumerate(calls):
        assert call.targets is not None
        target = call.targets[0]
        row = calls[0].sends[0].shape[1:]
        torch.cat(
            [piece[receiver] for piece in pieces],
            out=target.view(-1, *row) if row != target.shape[1:] else target,
        )


def _sent_all_to_all_single(calls: Sequence[Call]) -> list[list[int]]:
    row = calls[0].sends[0].shape[1:].numel() * calls[0].sends[0].element_size()
    return [[count * row for count in call.extra[1]] for call in calls]


def _nothing_to_check(calls: Sequence[Call], title: str, ranks: Sequence[int]) -> None:
    pass


def _nothing_to_move(calls: Sequence[Call]) -> None:
    pass


def _nothing_sent(calls: Sequence[Call]) -> list[list[int]]:
    return [[0] * len(calls) for _ in calls]


ALL_TO_ALL_SINGLE = Operation(
    "all_to_all_single",
    ("dtype", "row shape", "device"),
    _check_all_to_all_single,
    _move_all_to_all_single,
    _sent_all_to_all_single,
)
BARRIER = Operation("barrier", (), _nothing_to_check, _nothing_to_move, _nothing_sent)
