"""What the MPI backend asks of its arguments, before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def check_cpu(what: str, *tensors: torch.Tensor) -> None:
    """Raise ValueError unless MPI can reach the tensors' memory."""
    for tensor in tensors:
        if tensor.device.type != "cpu":
            raise ValueError(
                f"{what}: a tensor is on {tensor.device}: expected the CPU. The MPI backend moves "
                "host memory; use nccl or mccl for tensors on a GPU."
            )


def check(what: str, **tensors: torch.Tensor) -> None:
    """Raise ValueError unless each tensor is contiguous on the CPU; keywords name them."""
    check_cpu(what, *tensors.values())
    for role, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(
                f"{what}: {role} must be contiguous, got shape {list(tensor.shape)} with strides "
                f"{tensor.stride()}. Call .contiguous() first."
            )


def check_multiple(what: str, whole: torch.Tensor, part: torch.Tensor, size: int) -> None:
    """Raise ValueError unless `whole` has room for exactly one `part` of each rank."""
    if whole.dtype != part.dtype or whole.numel() != size * part.numel():
        raise ValueError(
            f"{what}: {part.dtype} {list(part.shape)} on each of {size} ranks makes "
            f"{size * part.numel()} elements, but the whole is {whole.dtype} {list(whole.shape)}: "
            "expected the same dtype and that number of elements."
        )


def row_counts(
    what: str, role: str, tensor: torch.Tensor, split_sizes: Sequence[int] | None, size: int
) -> list[int]:
    """Check one side of an all-to-all and return its rows for each rank."""
    if tensor.dim() == 0:
        raise ValueError(f"{what}: {role} has no dimension 0 to split.")
    check(what, **{role: tensor})
    rows = tensor.shape[0]
    if not split_sizes:
        if rows % size:
            raise ValueError(
                f"{what}: {role} has {rows} rows, which do not split evenly over {size} ranks. "
                "Pass split sizes."
            )
        return [rows // size] * size
    counts = [int(count) for count in split_sizes]
    if len(counts) != size or min(counts) < 0 or sum(counts) != rows:
        raise ValueError(
            f"{what}: {role} split sizes {counts} for {rows} rows and {size} ranks: expected one "
            f"non-negative number for each rank, adding up to {rows}."
        )
    return counts
