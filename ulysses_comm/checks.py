"""What every exchange checks before it sends anything, and what it then knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ulysses_comm.collective import is_tracked
from ulysses_comm.head_split import HeadSplit
from ulysses_comm.known import KnownCalls, key_of_call
from ulysses_comm.layout import (
    check_contiguous,
    check_heads_divide,
    check_same_device,
    check_same_head_dim,
    check_split_sizes,
    check_tensors,
    fixed,
    promoted_dtype,
    shares_memory,
    violated,
)
from ulysses_comm.wire import Wire, even_split, plan_wire

_KNOWN: KnownCalls[Wire] = KnownCalls()


@dataclass(frozen=True)
class HeadScatter:
    """A checked Q/K/V exchange.

    Attributes:
        inputs: (tokens, num_heads, head_dim), or head shards (tokens, world_size, heads per rank,
            head_dim) where every rank owns equally many.
        split_sizes: Tokens each rank owns, in rank order.
        wire: The layout; None if there are no inputs.
        copied_bytes: Bytes copied to bring inputs into this form: head shards of another world size
            whose strides allow no view.
    """

    inputs: list[torch.Tensor]
    split_sizes: list[int]
    wire: Wire | None
    copied_bytes: int

    def facts(self) -> dict[str, object]:
        """What all ranks must have in common for this exchange to be one."""
        return {
            "exchange": "scatter_heads_gather_seqlen",
            "split_sizes": self.split_sizes,
            **_wire_facts(self.inputs, self.wire),
        }


@dataclass(frozen=True)
class SeqlenScatter:
    """A checked output exchange.

    Attributes:
        inputs: Each (seqlen, heads of this rank, head_dim).
        split_sizes: Tokens each rank owns, in rank order.
        wire: The layout; None if there are no inputs.
    """

    inputs: list[torch.Tensor]
    split_sizes: list[int]
    wire: Wire | None

    def facts(self) -> dict[str, object]:
        """What all ranks must have in common for this exchange to be one."""
        return {
            "exchange": "scatter_seqlen",
            "split_sizes": self.split_sizes,
            **_wire_facts(self.inputs, self.wire),
        }


def check_head_scatter(
    tensors: Sequence[torch.Tensor],
    split_sizes: Sequence[int],
    rank: int,
    world_size: int,
    *,
    head_splits: Sequence[HeadSplit] | None,
    keep_dtypes: bool,
) -> HeadScatter:
    """Check the arguments of `scatter_heads_gather_seqlen`.

    Raises:
        ValueError: For everything the caller can get wrong; names the argument, what was given and
            what was expected.
    """
    key = key_of_call(tensors, split_sizes, head_splits, "heads", rank, world_size, keep_dtypes)
    known = _KNOWN.get(key)
    if known is not None:
        return HeadScatter(list(tensors), list(split_sizes), known, 0)
    sizes = check_split_sizes(split_sizes, world_size)
    tensors = check_tensors(tensors)
    for index, tensor in enumerate(tensors):
        _check_head_input(f"tensors[{index}]", tensor, sizes, rank)
    if not tensors:
        return HeadScatter([], sizes, None, 0)
    check_same_device(tensors)
    if not keep_dtypes:
        check_same_head_dim(tensors)
    splits = _splits_of(tensors, head_splits, world_size)
    dtypes = [t.dtype for t in tensors] if keep_dtypes else [promoted_dtype(tensors)] * len(tensors)
    wire = plan_wire(tuple(dtypes), tuple(fixed(t.shape[-1]) for t in tensors), splits)
    inputs, copied = [], 0
    for tensor, split in zip(tensors, splits, strict=True):
        if tensor.dim() == 4 and (tensor.shape[1] != world_size or not split.is_even):
            flat = tensor.flatten(1, 2)
            copied += 0 if shares_memory(flat, tensor) else flat.nbytes
            tensor = flat
        inputs.append(tensor)
    if all(given is taken for given, taken in zip(tensors, inputs, strict=True)):
        _KNOWN.remember(key, wire)
    return HeadScatter(inputs, sizes, wire, copied)


def check_seqlen_scatter(
    tensors: Sequence[torch.Tensor],
    split_sizes: Sequence[int],
    rank: int,
    world_size: int,
    *,
    head_splits: Sequence[HeadSplit] | None,
    keep_dtypes: bool,
    alone: bool,
) -> SeqlenScatter:
    """Check the arguments of the output exchange; `alone` if it is called with one tensor.

    Raises:
        ValueError: For everything the caller can get wrong; names the argument, what was given and
            what was expected.
    """
    key = key_of_call(
        tensors, split_sizes, head_splits, "seqlen", rank, world_size, keep_dtypes, alone
    )
    known = _KNOWN.get(key)
    if known is not None:
        return SeqlenScatter(list(tensors), list(split_sizes), known)
    sizes = check_split_sizes(split_sizes, world_size)
    name, split_name = ("tensor", "head_split") if alone else ("tensors[{}]", "head_splits[{}]")
    tensors = check_tensors(tensors, name=name)
    if not tensors:
        return SeqlenScatter([], sizes, None)
    for index, tensor in enumerate(tensors):
        _check_attention_output(name.format(index), tensor, sizes)
    if alone and not torch.compiler.is_compiling():
        # Traced, strides are the compiler's affair, and it makes contiguous what has to be.
        check_contiguous(name, tensors[0])
    check_same_device(tensors)
    if not keep_dtypes:
        check_same_head_dim(tensors)
    splits = _output_splits(tensors, head_splits, split_name, rank, world_size)
    dtypes = [t.dtype for t in tensors] if keep_dtypes else [promoted_dtype(tensors)] * len(tensors)
    wire = plan_wire(tuple(dtypes), tuple(fixed(t.shape[2]) for t in tensors), splits)
    _KNOWN.remember(key, wire)
    return SeqlenScatter(tensors, sizes, wire)


def check_out(
    out: torch.Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    inputs: Sequence[torch.Tensor],
) -> None:
    """Check the buffer that a caller wants a result in.

    Raises:
        ValueError: If it has another shape, dtype or device, is not contiguous, shares memory with
            an input, or would hide the result from autograd.
    """
    if out is None:
        return
    if torch.compiler.is_compiling():
        raise ValueError(
            "out cannot be used inside torch.compile, which plans memory itself: leave it out, or "
            "call the exchange outside the compiled region."
        )
    if not isinstance(out, torch.Tensor):
        raise ValueError(f"out is a {type(out).__name__}: expected a tensor of shape {shape}.")
    if tuple(out.shape) != shape or out.dtype != dtype or out.device != inputs[0].device:
        raise ValueError(
            f"out is {tuple(out.shape)} {out.dtype} on {out.device}: expected {shape} {dtype} on "
            f"{inputs[0].device}."
        )
    check_contiguous("out", out)
    if any(shares_memory(out, tensor) for tensor in inputs):
        raise ValueError(
            "out lies in the storage of an input, which is still being read while out is written: "
            "expected memory of its own."
        )
    if is_tracked([out, *inputs]):
        raise ValueError(
            "out cannot be used while autograd tracks the inputs: leave it out, or run under "
            "torch.no_grad()."
        )


def check_results(
    results: Sequence[torch.Tensor], checked: SeqlenScatter, rank: int, *, as_shards: bool
) -> None:
    """Check the tensors that a caller wants the results of an output exchange in.

    Raises:
        ValueError: As `check_out`; also if there is not one for each input.
    """
    if len(results) != len(checked.inputs) or checked.wire is None:
        raise ValueError(
            f"out has {len(results)} tensors for {len(checked.inputs)} inputs: expected one for "
            "each."
        )
    tokens, world_size = checked.split_sizes[rank], len(checked.split_sizes)
    for index, (out, split) in enumerate(zip(results, checked.wire.splits, strict=True)):
        head_dim = checked.wire.head_dims[index]
        shape: tuple[int, ...] = (tokens, split.num_heads, head_dim)
        if as_shards:
            shape = (world_size, tokens, split.counts[rank], head_dim)
        check_out(out, shape, checked.wire.dtypes[index], checked.inputs)


def _wire_facts(inputs: Sequence[torch.Tensor], wire: Wire | None) -> dict[str, object]:
    if wire is None:
        return {"inputs": 0}
    return {
        "device": inputs[0].device.type,
        # A rank that goes backward alone waits there for the others.
        "tracked by autograd": is_tracked(inputs),
        "heads per rank": [
            split.counts[0] if split.is_even else list(split.ranges) for split in wire.splits
        ],
        "head_dim": wire.head_dims,
        "dtype": [str(dtype) for dtype in wire.dtypes],
    }


def _check_head_input(name: str, tensor: torch.Tensor, split_sizes: list[int], rank: int) -> None:
    if tensor.dim() not in (3, 4):
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}: expected 3 dimensions (tokens of this rank, "
            "heads, head_dim), or 4 (tokens of this rank, world_size, heads per rank, head_dim). "
            "Merge a batch into the tokens."
        )
    if violated(tensor.shape[0] == split_sizes[rank]):
        raise ValueError(
            f"{name} of shape {tuple(tensor.shape)} has {tensor.shape[0]} tokens: expected "
            f"split_sizes[{rank}]={split_sizes[rank]}, the tokens of rank {rank}. Pass this rank's "
            "shard of the sequence, tokens first."
        )


def _check_attention_output(name: str, tensor: torch.Tensor, split_sizes: list[int]) -> None:
    if tensor.dim() != 3:
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)}: expected 3 dimensions (seqlen, heads of this "
            "rank, head_dim), the attention output of the whole sequence. Merge a batch into it."
        )
    if violated(tensor.shape[0] == sum(split_sizes)):
        raise ValueError(
            f"{name} has {tensor.shape[0]} tokens, but split_sizes={split_sizes} add up to "
            f"{sum(split_sizes)}: expected the attention output of the whole sequence."
        )


def _output_splits(
    tensors: Sequence[torch.Tensor],
    head_splits: Sequence[HeadSplit] | None,
    split_name: str,
    rank: int,
    world_size: int,
) -> tuple[HeadSplit, ...]:
    if head_splits is None:
        return tuple(even_split(fixed(tensor.shape[1]), world_size) for tensor in tensors)
    _check_one_for_each(head_splits, tensors)
    for index, (tensor, split) in enumerate(zip(tensors, head_splits, strict=True)):
        name = split_name.format(index)
        _check_split(name, split, split.num_heads, world_size)
        if tensor.shape[1] != split.counts[rank]:
            raise ValueError(
                f"A tensor of shape {tuple(tensor.shape)} has {tensor.shape[1]} heads: expected "
                f"{split.counts[rank]}, those of rank {rank} by {name}={list(split.ranges)}."
            )
    return _fixed_splits(head_splits)


def _check_one_for_each(head_splits: Sequence[HeadSplit], tensors: Sequence[torch.Tensor]) -> None:
    if isinstance(head_splits, HeadSplit) or not all(
        isinstance(split, HeadSplit) for split in head_splits
    ):
        raise ValueError(
            f"head_splits={head_splits!r}: expected a list of HeadSplit, one for each tensor."
        )
    if len(head_splits) != len(tensors):
        raise ValueError(
            f"head_splits has {len(head_splits)} entries for {len(tensors)} tensors: expected one "
            "for each."
        )


def _num_heads(tensor: torch.Tensor) -> int:
    return fixed(tensor.shape[1] if tensor.dim() == 3 else tensor.shape[1] * tensor.shape[2])


def _splits_of(
    tensors: Sequence[torch.Tensor], head_splits: Sequence[HeadSplit] | None, world_size: int
) -> tuple[HeadSplit, ...]:
    if head_splits is None:
        for index, tensor in enumerate(tensors):
            name = f"tensors[{index}] of shape {tuple(tensor.shape)}"
            check_heads_divide(name, _num_heads(tensor), world_size)
        return tuple(even_split(_num_heads(t) // world_size, world_size) for t in tensors)
    _check_one_for_each(head_splits, tensors)
    for index, (tensor, split) in enumerate(zip(tensors, head_splits, strict=True)):
        _check_split(f"head_splits[{index}]", split, _num_heads(tensor), world_size)
    return _fixed_splits(head_splits)


def _fixed_splits(head_splits: Sequence[HeadSplit]) -> tuple[HeadSplit, ...]:
    """Return the splits; traced, of numbers that are constants of the graph."""
    if not torch.compiler.is_compiling():
        return tuple(head_splits)
    return tuple(
        HeadSplit(
            fixed(split.num_heads),
            tuple((fixed(start), fixed(stop)) for start, stop in split.ranges),
        )
        for split in head_splits
    )


def _check_split(name: str, split: HeadSplit, num_heads: int, world_size: int) -> None:
    if split.num_heads != num_heads or split.world_size != world_size:
        raise ValueError(
            f"{name} spreads {split.num_heads} heads over {split.world_size} ranks: expected "
            f"{num_heads} heads over {world_size}."
        )
