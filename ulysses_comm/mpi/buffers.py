"""Tensors as MPI sees them: their bytes where they lie, in units that MPI can count."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from mpi4py import MPI

COUNT_LIMIT = 2**31 - 1
"""Largest count and displacement that every MPI takes: a C int."""

_BLOCK = 2**30  # bytes; blocks of blocks reach any size with int counts


def memory(tensor: torch.Tensor) -> MPI.buffer:
    """Return the memory of a contiguous CPU tensor, without a copy; the tensor must outlive it."""
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


def overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two contiguous tensors share a byte, which MPI forbids between send and receive."""
    start, other = first.data_ptr(), second.data_ptr()
    return start < other + second.nbytes and other < start + first.nbytes


def byte_type(nbytes: int) -> MPI.Datatype:
    """Return a committed datatype of `nbytes` adjacent bytes, any number of them."""
    if nbytes <= _BLOCK:
        return MPI.BYTE.Create_contiguous(nbytes).Commit()
    blocks, rest = divmod(nbytes, _BLOCK)
    block = MPI.BYTE.Create_contiguous(_BLOCK)
    body = block.Create_contiguous(blocks)
    whole = MPI.Datatype.Create_struct([1, rest], [0, blocks * _BLOCK], [body, MPI.BYTE]).Commit()
    block.Free()
    body.Free()
    return whole


@contextmanager
def byte_types(*sizes: int) -> Iterator[list[MPI.Datatype]]:
    """Provide `byte_type` for each size; MPI keeps what it still needs after the block."""
    types = [byte_type(size) for size in sizes]
    try:
        yield types
    finally:
        for datatype in types:
            datatype.Free()


class RowCounts(NamedTuple):
    """Counts of an all-to-all in units of `unit` bytes, each below MPI's limit."""

    unit: int
    sends: list[int]
    receives: list[int]


def count_rows(row_bytes: int, sends: Sequence[int], receives: Sequence[int]) -> RowCounts:
    """Choose the unit in which an all-to-all of rows is counted: a row, or as many as needed.

    MPI counts and displaces in units of a datatype, and these numbers are C ints in every MPI
    before version 4. Rows are large enough as a rule; where there are too many, the unit is the
    most rows that divide all counts. Ranks may choose different units: MPI compares bytes.

    Raises:
        ValueError: If no unit brings the counts below the limit and this MPI has no larger counts.
    """
    sends, receives = list(sends), list(receives)
    if row_bytes == 0:
        return RowCounts(1, [0] * len(sends), [0] * len(receives))
    most = max(sum(sends), sum(receives))
    if most <= COUNT_LIMIT:
        return RowCounts(row_bytes, sends, receives)
    common = math.gcd(*sends, *receives)
    if most // common > COUNT_LIMIT and MPI.VERSION < 4:
        raise ValueError(
            f"all_to_all_single moves {most} rows of {row_bytes} bytes with a common divisor of "
            f"{common}, so the counts pass {COUNT_LIMIT}, the largest that MPI "
            f"{MPI.VERSION}.{MPI.SUBVERSION} takes. Use wider rows, several exchanges, or an MPI "
            "of version 4, such as pip install mpich."
        )
    return RowCounts(
        row_bytes * common,
        [count // common for count in sends],
        [count // common for count in receives],
    )


def vector(tensor: torch.Tensor, counts: Sequence[int], datatype: MPI.Datatype) -> list[Any]:
    """Return mpi4py's description of a tensor as adjacent pieces of `counts` units."""
    displacements, end = [], 0
    for count in counts:
        displacements.append(end)
        end += count
    return [memory(tensor), list(counts), displacements, datatype]


@contextmanager
def tensors_as_types(tensors: Sequence[torch.Tensor | None]) -> Iterator[list[Any]]:
    """Provide mpi4py's description of one contiguous tensor for each rank, wherever they lie.

    For `Ialltoallw` from `MPI.BOTTOM`: each datatype holds its tensor's address. None sends or
    receives nothing.
    """
    types = []
    for tensor in tensors:
        if tensor is None or tensor.numel() == 0:
            types.append(MPI.BYTE.Dup())
            continue
        body = byte_type(tensor.nbytes)
        types.append(body.Create_hindexed([1], [tensor.data_ptr()]).Commit())
        body.Free()
    counts = [int(tensor is not None and tensor.numel() > 0) for tensor in tensors]
    try:
        yield [MPI.BOTTOM, (counts, [0] * len(types)), types]
    finally:
        for datatype in types:
            datatype.Free()
