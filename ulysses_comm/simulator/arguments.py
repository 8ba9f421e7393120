"""Checks of what one rank passes to a collective; all raise ValueError on that rank alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ulysses_comm.simulator.text import describe, dtype_name


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def facts_of(tensors: Sequence[torch.Tensor]) -> tuple[object, ...]:
    """Return dtype, shape and device type of a tensor, or a tuple of each for several."""
    if len(tensors) == 1:
        tensor = tensors[0]
        return dtype_name(tensor.dtype), tuple(tensor.shape), tensor.device.type
    return (
        tuple([dtype_name(tensor.dtype) for tensor in tensors]),
        tuple([tuple(tensor.shape) for tensor in tensors]),
        tuple([tensor.device.type for tensor in tensors]),
    )


def require_dense(name: str, **tensors: torch.Tensor) -> None:
    """Refuse tensors that a real backend refuses or, worse, fills wrongly."""
    for role, tensor in tensors.items():
        if tensor.layout != torch.strided:
            raise ValueError(
                f"{name}: {role} has layout {tensor.layout}, which the simulator does not move; "
                f"pass a dense tensor"
            )
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name}: {role} must be contiguous, got shape {tuple(tensor.shape)} with strides "
                f"{tensor.stride()}; call .contiguous() first"
            )


def require_dense_in_any_order(name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Refuse strided tensors, but let channels-last ones pass: every element keeps its place."""
    for tensor in tensors:
        orders = {4: torch.channels_last, 5: torch.channels_last_3d}
        order = orders.get(tensor.dim())
        if order is None or not tensor.is_contiguous(memory_format=order):
            require_dense(name, tensor=tensor)


def require_same_dtype(name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Refuse tensors of different dtypes or device types in one call."""
    for tensor in tensors[1:]:
        if tensor.dtype != tensors[0].dtype or tensor.device.type != tensors[0].device.type:
            raise ValueError(
                f"{name}: all tensors must share dtype and device type, got "
                f"{describe(tensors[0])} and {describe(tensor)}"
            )


def require_count(name: str, role: str, tensors: Sequence[torch.Tensor], expected: int) -> None:
    """Refuse a list that does not hold one tensor per rank."""
    if len(tensors) != expected:
        raise ValueError(f"{name}: {role} holds {len(tensors)} tensors, expected {expected}")


def require_times(
    name: str, larger: tuple[str, torch.Tensor], smaller: tuple[str, torch.Tensor], size: int
) -> None:
    """Refuse buffers of which one is not `size` times the other."""
    (large_role, large), (small_role, small) = larger, smaller
    if large.numel() != size * small.numel():
        raise ValueError(
            f"{name}: {large_role} must hold {size} times the elements of {small_role}, got "
            f"{describe(large)} ({large.numel()} elements) and {describe(small)} "
            f"({small.numel()} elements)"
        )


def row_counts(
    role: str, tensor: torch.Tensor, given: Sequence[int] | None, size: int
) -> list[int]:
    """Return how many rows of dimension 0 belong to each rank."""
    if tensor.dim() == 0:
        raise ValueError(f"{role} is a scalar, it has no dimension 0 to split")
    rows = tensor.shape[0]
    if not given:
        if rows % size:
            raise ValueError(
                f"{role} has {rows} rows, which do not split evenly over {size} ranks: pass split "
                f"sizes"
            )
        return [rows // size] * size
    counts = [int(count) for count in given]
    if len(counts) != size:
        raise ValueError(f"{role} has {len(counts)} split sizes {counts}, expected {size}")
    if min(counts) < 0 or sum(counts) != rows:
        raise ValueError(
            f"{role} split sizes {counts} must be non-negative and add up to its dimension 0: they "
            f"add up to {sum(counts)}, dimension 0 is {rows}"
        )
    return counts


def refuse_overlap(
    name: str, sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]
) -> None:
    """Refuse to receive into memory that is still to be sent."""
    for send in sends:
        for receive in receives:
            # Meta tensors all lie at address 0.
            if (
                send.data_ptr() != 0
                and send.untyped_storage().data_ptr() == receive.untyped_storage().data_ptr()
                and send.data_ptr() < receive.data_ptr() + receive.nbytes
                and receive.data_ptr() < send.data_ptr() + send.nbytes
            ):
                raise ValueError(
                    f"{name}: the receive buffer overlaps the send buffer, so its result would "
                    f"depend on the order of arrival; use two buffers"
                )
