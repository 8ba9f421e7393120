"""Arithmetic of split sizes, and the checks that every exchange makes before it sends anything."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch


def balanced_split_sizes(length: int, world_size: int) -> list[int]:
    """Split `length` tokens over `world_size` ranks as evenly as whole tokens allow.

    Args:
        length: Tokens of the whole sequence, zero or more.
        world_size: Ranks that share it, one or more.

    Returns:
        Tokens per rank in rank order; the first `length % world_size` ranks own one more.

    Raises:
        ValueError: If length is negative or world_size is not positive.
    """
    if length < 0:
        raise ValueError(f"length={length}: expected zero or more tokens.")
    if world_size < 1:
        raise ValueError(f"world_size={world_size}: expected one rank or more.")
    share, extra = divmod(length, world_size)
    return [share + 1] * extra + [share] * (world_size - extra)


def check_split_sizes(split_sizes: Sequence[int], world_size: int) -> list[int]:
    """Return `split_sizes` as a list of `world_size` non-negative ints.

    Raises:
        ValueError: If it has another length, a negative entry, or one that is not a whole number.
    """
    if isinstance(split_sizes, (str, bytes)) or not hasattr(split_sizes, "__len__"):
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
    if any(size < 0 for size in sizes):
        raise ValueError(
            f"split_sizes={sizes}: expected token counts of zero or more. A rank may own no tokens."
        )
    return sizes


def _token_count(size: int, split_sizes: Sequence[int]) -> int:
    if isinstance(size, torch.SymInt):
        return size  # traced: stands for an int
    if isinstance(size, bool) or not hasattr(size, "__index__"):
        raise ValueError(f"split_sizes={list(split_sizes)}: expected whole numbers, got {size!r}.")
    return operator.index(size)


@dataclass(frozen=True)
class HeadScatter:
    """A checked Q/K/V exchange: what this rank sends, as head shards.

    Attributes:
        shards: Each input as (seqlen_local, world_size, num_heads_local, head_dim).
        split_sizes: Tokens each rank owns, in rank order.
        dtypes: What each input travels as: all the promoted dtype, or each its own.
        copied_bytes: Bytes copied to see the inputs as head shards; zero unless an input was packed
            for another world size.
    """

    shards: list[torch.Tensor]
    split_sizes: list[int]
    dtypes: list[torch.dtype]
    copied_bytes: int

    @property
    def head_counts(self) -> list[int]:
        """Heads per rank of each input."""
        return [shard.shape[2] for shard in self.shards]

    @property
    def head_dims(self) -> list[int]:
        """Channels of a head of each input."""
        return [shard.shape[3] for shard in self.shards]

    @property
    def is_uniform(self) -> bool:
        """Whether all inputs travel as one dtype with one head_dim, in one plain buffer."""
        return len(set(self.dtypes)) == 1 and len(set(self.head_dims)) == 1

    def facts(self) -> dict[str, object]:
        """What all ranks must have in common for this exchange to be one."""
        return {
            "exchange": "scatter_heads_gather_seqlen",
            "split_sizes": self.split_sizes,
            "heads per rank": self.head_counts,
            "head_dim": self.head_dims,
            "dtype": [str(dtype) for dtype in self.dtypes],
        }


@dataclass(frozen=True)
class SeqlenScatter:
    """A checked output exchange: this rank's heads of the whole sequence.

    Attributes:
        tensor: (seqlen, num_heads_local, head_dim), contiguous.
        split_sizes: Tokens each rank owns, in rank order.
    """

    tensor: torch.Tensor
    split_sizes: list[int]

    def facts(self) -> dict[str, object]:
        """What all ranks must have in common for this exchange to be one."""
        return {
            "exchange": "scatter_seqlen",
            "split_sizes": self.split_sizes,
            "heads per rank": self.tensor.shape[1],
            "head_dim": self.tensor.shape[2],
            "dtype": str(self.tensor.dtype),
        }


def check_head_scatter(
    tensors: Sequence[torch.Tensor],
    split_sizes: Sequence[int],
    rank: int,
    world_size: int,
    *,
    keep_dtypes: bool,
) -> HeadScatter:
    """Check the arguments of `scatter_heads_gather_seqlen` and see every input as head shards.

    Raises:
        ValueError: For everything the caller can get wrong; names the argument, what was given and
            what was expected.
    """
    sizes = check_split_sizes(split_sizes, world_size)
    tensors = check_tensors(tensors)
    for index, tensor in enumerate(tensors):
        _check_head_input(f"tensors[{index}]", tensor, sizes, rank, world_size)
    _check_same_device(tensors)
    if not keep_dtypes:
        check_same_head_dim(tensors)
    dtypes = [t.dtype for t in tensors] if keep_dtypes else [promoted_dtype(tensors)] * len(tensors)
    shards = [as_head_shards(tensor, world_size) for tensor in tensors]
    copied = sum(
        shard.nbytes
        for shard, tensor in zip(shards, tensors, strict=True)
        if tensor.dim() == 4 and tensor.shape[1] != world_size and not shares_memory(shard, tensor)
    )
    return HeadScatter(shards, sizes, dtypes, copied)


def check_seqlen_scatter(
    tensor: torch.Tensor, split_sizes: Sequence[int], world_size: int
) -> SeqlenScatter:
    """Check the arguments of the output exchange.

    Raises:
        ValueError: For everything the caller can get wrong; names the argument, what was given and
            what was expected.
    """
    sizes = check_split_sizes(split_sizes, world_size)
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"tensor is a {type(tensor).__name__}: expected a torch.Tensor.")
    if tensor.dim() != 3:
        raise ValueError(
            f"tensor has shape {tuple(tensor.shape)}: expected 3 dimensions (seqlen, heads of this "
            "rank, head_dim), the attention output of the whole sequence. Merge a batch into it."
        )
    _check_dense("tensor", tensor)
    if tensor.shape[0] != sum(sizes):
        raise ValueError(
            f"tensor has {tensor.shape[0]} tokens, but split_sizes={sizes} add up to {sum(sizes)}: "
            "expected the attention output of the whole sequence."
        )
    if not tensor.is_contiguous():
        raise ValueError(
            f"tensor of shape {tuple(tensor.shape)} has strides {tensor.stride()}: expected a "
            "contiguous tensor, since it is sent as it lies. Pass tensor.contiguous(), or let the "
            "attention write (seqlen, heads, head_dim)."
        )
    return SeqlenScatter(tensor, sizes)


def check_tensors(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return `tensors` as a list of dense tensors.

    Raises:
        ValueError: If it is one tensor, or holds something that is not a dense tensor.
    """
    if isinstance(tensors, torch.Tensor):
        raise ValueError(
            f"tensors is one tensor of shape {tuple(tensors.shape)}: expected a list of them, for "
            "example [q, k, v]. Pass [tensor] for one."
        )
    tensors = list(tensors)
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(
                f"tensors[{index}] is a {type(tensor).__name__}: expected a torch.Tensor."
            )
        _check_dense(f"tensors[{index}]", tensor)
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
            f"multiple of {world_size}. Use a group whose size divides the head count."
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
            f"tensors have dtypes {[str(dtype) for dtype in dtypes]}, which torch does not promote "
            "to a common one: cast them, or pass keep_dtypes=True to send each as it is."
        ) from error


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


def _check_head_input(
    name: str, tensor: torch.Tensor, split_sizes: list[int], rank: int, world_size: int
) -> None:
    if tensor.dim() not in (3, 4):
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}: expected 3 dimensions (tokens of this rank, "
            "heads, head_dim), or 4 (tokens of this rank, world_size, heads per rank, head_dim). "
            "Merge a batch into the tokens."
        )
    if tensor.shape[0] != split_sizes[rank]:
        raise ValueError(
            f"{name} of shape {tuple(tensor.shape)} has {tensor.shape[0]} tokens: expected "
            f"split_sizes[{rank}]={split_sizes[rank]}, the tokens of rank {rank}. Pass this rank's "
            "shard of the sequence, tokens first."
        )
    heads = tensor.shape[1] if tensor.dim() == 3 else tensor.shape[1] * tensor.shape[2]
    check_heads_divide(f"{name} of shape {tuple(tensor.shape)}", heads, world_size)


def _check_dense(name: str, tensor: torch.Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError(
            f"{name} has layout {tensor.layout} and dtype {tensor.dtype}: expected a dense tensor."
        )


def _check_same_device(tensors: Sequence[torch.Tensor]) -> None:
    devices = [tensor.device for tensor in tensors]
    if any(device != devices[0] for device in devices):
        raise ValueError(
            f"tensors lie on devices {[str(device) for device in devices]}: expected one device "
            "for all inputs of one exchange."
        )
