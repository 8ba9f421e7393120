"""How a reduction of a torch dtype is carried out in the dtypes and operations that MPI has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from ulysses_comm.mpi.buffers import memory, overlap

ELEMENTS_AT_ONCE = 2**30
"""Elements of one MPI reduction; longer tensors take several, so that counts stay C ints."""

_MPI_TYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.uint8: MPI.UINT8_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
}

# torch's operation; MPI's on numbers; MPI's on truth values, where a sum is "any", as on NCCL.
_OPERATIONS = (
    (dist.ReduceOp.SUM, MPI.SUM, MPI.MAX),
    (dist.ReduceOp.AVG, MPI.SUM, None),
    (dist.ReduceOp.PRODUCT, MPI.PROD, MPI.MIN),
    (dist.ReduceOp.MIN, MPI.MIN, MPI.MIN),
    (dist.ReduceOp.MAX, MPI.MAX, MPI.MAX),
    (dist.ReduceOp.BAND, MPI.BAND, MPI.BAND),
    (dist.ReduceOp.BOR, MPI.BOR, MPI.BOR),
    (dist.ReduceOp.BXOR, MPI.BXOR, MPI.BXOR),
)
_BITWISE = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)


@dataclass(frozen=True)
class Reduction:
    """One operation on one dtype. MPI reduces a carrier, of a dtype that it knows."""

    operation: MPI.Op
    carrier: torch.dtype
    divisor: int  # what the result is divided by: the number of ranks for an average

    @classmethod
    def plan(cls, dtype: torch.dtype, reduce_op: Any, num_ranks: int) -> Reduction:
        """Find the operation and carrier.

        Raises:
            ValueError: If the operation is not defined on the dtype, or unknown to MPI.
        """
        operation = next(
            (
                on_bool if dtype == torch.bool else on_numbers
                for torch_op, on_numbers, on_bool in _OPERATIONS
                if reduce_op == torch_op
            ),
            None,
        )
        average = reduce_op == dist.ReduceOp.AVG
        continuous = dtype.is_floating_point or dtype.is_complex
        if average and not continuous:
            raise ValueError(f"ReduceOp.AVG of {dtype}: expected a floating-point dtype; use SUM.")
        if operation is None:
            raise ValueError(
                "MPI has no such reduction: expected SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or "
                "BXOR. Scale the tensor yourself instead of PREMUL_SUM."
            )
        if continuous and any(reduce_op == bitwise for bitwise in _BITWISE):
            raise ValueError(f"a bitwise reduction of {dtype}: expected an integer dtype.")
        if dtype.is_complex and operation != MPI.SUM:
            raise ValueError(f"a reduction of {dtype}: expected SUM or AVG.")
        return cls(operation, _carrier(dtype), num_ranks if average else 1)

    def carry(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the contiguous tensor that MPI reduces: this memory if possible, else a copy.

        16-bit and 8-bit floats go through float32, so that a sum is rounded once.
        """
        tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        if tensor.dtype == torch.bool:
            return tensor.view(torch.uint8)
        return tensor.to(self.carrier)

    def deliver(self, carrier: torch.Tensor, tensor: torch.Tensor) -> None:
        """Bring a reduced carrier home: divide for an average, copy unless it is the memory."""
        with torch.no_grad():
            if self.divisor > 1:
                carrier.div_(self.divisor)
            home = tensor.detach()
            if home.is_complex():
                carrier = torch.view_as_complex(carrier)
            if carrier.data_ptr() != home.data_ptr() or not home.is_contiguous():
                home.copy_(carrier.view(home.shape))

    def landing(self, output: torch.Tensor, *, apart_from: torch.Tensor) -> torch.Tensor:
        """Return a carrier to receive `output`, in its own memory unless MPI reads that too."""
        target = self.carry(output)
        return torch.empty_like(target) if overlap(target, apart_from) else target

    def message(self, carrier: torch.Tensor) -> list[Any]:
        """Return mpi4py's description of a whole carrier."""
        return [memory(carrier), carrier.numel(), _MPI_TYPES[self.carrier]]

    def messages(self, *carriers: torch.Tensor) -> Iterator[list[list[Any]]]:
        """Yield mpi4py's descriptions of equally long carriers, a stretch of all at a time."""
        flat = [carrier.view(-1) for carrier in carriers]
        # At least one message, empty or not: every rank has to take part.
        for start in range(0, max(flat[0].numel(), 1), ELEMENTS_AT_ONCE):
            pieces = [tensor[start : start + ELEMENTS_AT_ONCE] for tensor in flat]
            yield [self.message(piece) for piece in pieces]


def _carrier(dtype: torch.dtype) -> torch.dtype:
    if dtype in _MPI_TYPES:
        return dtype
    if dtype == torch.bool:
        return torch.uint8
    if dtype.is_complex:
        return _carrier(dtype.to_real())
    if dtype.is_floating_point:
        return torch.float32
    raise ValueError(f"MPI cannot reduce {dtype}: expected a number or bool dtype.")
