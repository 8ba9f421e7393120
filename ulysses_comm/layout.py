"""Arithmetic of split sizes, and checks of tensors that several parts of the package share."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterable, Mapping, Sequence, Set

import torch


def balanced_split_sizes(length: int, world_size: int) -> list[int]:
    """Split `length` tokens over `world_size` ranks as evenly as whole tokens allow.

    Args:
        length: Tokens of the whole sequence, zero or more.
        world_size: Ranks that share it, one or more.

    Returns:
        Tokens per rank in rank order; the first `length % world_size` ranks own one more.

    Raises:
        ValueError: If length is negative, world_size not positive, or either not a whole number.
    """
    length, world_size = whole_number("length", length), whole_number("world_size", world_size)
    if length < 0:
        raise ValueError(f"length={length}: expected zero or more tokens.")
    if world_size < 1:
        raise ValueError(f"world_size={world_size}: expected one rank or more.")
    share, extra = divmod(length, world_size)
    return [share + 1] * extra + [share] * (world_size - extra)


def whole_number(name: str, value: int) -> int:
    """Return a value as a plain int; traced sizes (`torch.SymInt`) stay as they are.

    Raises:
        ValueError: If it is not a whole number: a float, a bool, a string.
    """
    if type(value) is int or isinstance(value, torch.SymInt):
        return value
    is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
    if not is_bool:
        with contextlib.suppress(TypeError):
            return operator.index(value)
    raise ValueError(f"{name}={value!r}: expected a whole number.")


def check_split_sizes(split_sizes: Sequence[int] | torch.Tensor, world_size: int) -> list[int]:
    """Return `split_sizes` as a list of `world_size` non-negative ints.

    Raises:
        ValueError: If it has another length, a negative entry, or one that is not a whole number.
    """
    if isinstance(split_sizes, torch.Tensor):
        if torch.compiler.is_compiling():
            raise ValueError(
                "split_sizes is a tensor inside torch.compile: expected numbers. Read them once "
                "for all exchanges, by ulysses_comm.read_split_sizes."
            )
        if split_sizes.dim() != 1 or split_sizes.dtype != torch.int64 or split_sizes.is_meta:
            raise ValueError(
                f"split_sizes is a tensor of shape {tuple(split_sizes.shape)} and "
                f"{split_sizes.dtype} on {split_sizes.device}: expected a list, or int64 of shape "
                f"({world_size},) with values."
            )
        split_sizes = split_sizes.tolist()
    # Sets and mappings have lengths too, but no order of ranks.
    if isinstance(split_sizes, (str, bytes, Set, Mapping)) or not hasattr(split_sizes, "__len__"):
        raise ValueError(
            f"split_sizes={split_sizes!r}: expected a sequence of {world_size} token counts, one "
            "per rank. ulysses_comm.balanced_split_sizes makes one from a length."
        )
    if len(split_sizes) != world_size:
        raise ValueError(
            f"split_sizes={list(split_sizes)} has {len(split_sizes)} entries: expected one token "
            f"count for each of the {world_size} ranks of the group."
        )
    sizes = [_token_count(size, split_sizes) for size in split_sizes]
    if any(violated(size >= 0) for size in sizes):
        raise ValueError(
            f"split_sizes={sizes}: expected token counts of zero or more. A rank may own no tokens."
        )
    return sizes


def violated(holds: bool) -> bool:
    """Tell whether a condition on sizes does not hold.

    Traced, a condition on sizes that are only known at run time (unbacked ones) becomes an
    assertion of the graph, which raises a RuntimeError there, and counts as met here. What must
    not be missed has to be compared at run time too; see `read_split_sizes`.
    """
    if not torch.compiler.is_compiling():
        return not holds
    # Imported here: it brings sympy, which only a compiler needs.
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    if not guard_or_true(holds):
        return True
    torch._check(holds)
    return False


def fixed(size: int) -> int:
    """Return a size that a trace specialises on: a head count or head_dim, facts of the model."""
    return operator.index(size)


def _token_count(size: int, split_sizes: Sequence[int]) -> int:
    try:
        return whole_number("size", size)
    except ValueError:
        raise ValueError(
            f"split_sizes={list(split_sizes)}: expected whole numbers, got {size!r}."
        ) from None


def check_tensors(tensors: Sequence[torch.Tensor], name: str = "tensors[{}]") -> list[torch.Tensor]:
    """Return `tensors` as a list of dense tensors; `name` is what messages call one.

    Raises:
        ValueError: If it is one tensor, or holds something that is not a dense tensor.
    """
    if isinstance(tensors, torch.Tensor):
        raise ValueError(
            f"tensors is one tensor of shape {tuple(tensors.shape)}: expected a list of them, for "
            "example [q, k, v]. Pass [tensor] for one."
        )
    if not isinstance(tensors, Iterable):
        raise ValueError(
            f"tensors is a {type(tensors).__name__}: expected a list of tensors, for example "
            "[q, k, v]."
        )
    tensors = list(tensors)
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"{name.format(index)} is a {type(tensor).__name__}: expected a torch.Tensor."
            )
        if hasattr(tensor, "to_local"):  # a DTensor; not imported for this, it is a large import
            raise ValueError(
                f"{name.format(index)} is a {type(tensor).__name__}: expected this rank's own "
                "tensor. Pass its to_local()."
            )
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
            kind = "nested" if tensor.is_nested else str(tensor.layout)
            raise ValueError(
                f"{name.format(index)} has layout {kind} and dtype {tensor.dtype}: expected a "
                "dense tensor."
            )
        if tensor.dim() and tensor.shape[-1] == 0:
            raise ValueError(
                f"{name.format(index)} has shape {tuple(tensor.shape)}: expected a head_dim of one "
                "or more in the last dimension."
            )
    return tensors


def check_same_head_dim(tensors: Sequence[torch.Tensor]) -> None:
    """Check that all inputs have the same last dimension.

    Raises:
        ValueError: If they do not.
    """
    head_dims = [tensor.shape[-1] for tensor in tensors]
    if any(head_dim != head_dims[0] for head_dim in head_dims):
        raise ValueError(
            f"tensors have head_dim {head_dims}: expected the same for every input of one "
            "exchange. scatter_heads_gather_seqlen(..., keep_dtypes=True) sends different ones."
        )


def check_heads_divide(name: str, num_heads: int, world_size: int) -> None:
    """Check that every rank gets the same number of heads, one at least.

    Raises:
        ValueError: If not.
    """
    if num_heads % world_size or num_heads == 0:
        raise ValueError(
            f"{name} has {num_heads} heads, which do not split over {world_size} ranks: expected a "
            f"multiple of {world_size}. Pass head_splits for uneven shares, or a group whose size "
            "divides the head count."
        )


def promoted_dtype(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """Return the dtype that all inputs travel as, by `torch.promote_types`.

    Raises:
        ValueError: If torch has no promotion for them (float8 beside another dtype).
    """
    dtypes = [tensor.dtype for tensor in tensors]
    if all(dtype == dtypes[0] for dtype in dtypes):
        return dtypes[0]
    try:
        return functools.reduce(torch.promote_types, dtypes)
    except RuntimeError as error:
        raise ValueError(
            f"tensors have dtypes {[str(dtype) for dtype in dtypes]}, which torch does not "
            "promote: expected a common one. Cast them, or pass keep_dtypes=True to send each as "
            "it is."
        ) from error


def summing_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return what values of a dtype are added up in: one that has a sum, and rounds once."""
    if dtype.is_floating_point and dtype.itemsize < 4:
        return torch.float32
    # torch adds none of these; sums that wrap around in 64 bits do so in fewer too.
    return torch.int64 if dtype in (torch.uint16, torch.uint32, torch.uint64) else dtype


def as_head_shards(tensor: torch.Tensor, world_size: int) -> torch.Tensor:
    """See (tokens, heads, head_dim) or head shards as (tokens, world_size, heads / world_size, ·).

    A view, except for head shards of another world size whose strides do not allow one.
    """
    if tensor.dim() == 4:
        if tensor.shape[1] == world_size:
            return tensor
        tensor = tensor.flatten(1, 2)
    shards: torch.Tensor = tensor.unflatten(1, (world_size, tensor.shape[1] // world_size))
    return shards


def shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors lie in the same storage."""
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def check_contiguous(name: str, tensor: torch.Tensor) -> None:
    """Check that a tensor that is sent or written as it lies is contiguous.

    Raises:
        ValueError: If it is not.
    """
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} of shape {tuple(tensor.shape)} has strides {tensor.stride()}: expected a "
            "contiguous tensor, since it is used as it lies. Pass a .contiguous() one, or let what "
            "makes it write (tokens, heads, head_dim)."
        )


def check_same_device(tensors: Sequence[torch.Tensor]) -> None:
    """Check that all inputs lie on one device.

    Raises:
        ValueError: If they do not.
    """
    devices = [tensor.device for tensor in tensors]
    if any(device != devices[0] for device in devices):
        raise ValueError(
            f"tensors lie on devices {[str(device) for device in devices]}: expected one device "
            "for all inputs of one exchange."
        )
