"""Collectives that combine the ranks' elements, always in rank order.

Every element is combined starting from rank 0, in the tensors' own dtype; floating dtypes of up to
16 bits are combined in float32 and rounded once at the end. Real backends choose other orders and
round more often, so their last bits may differ; here they are the same in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ulysses_comm.simulator import arguments
from ulysses_comm.simulator.arguments import nbytes
from ulysses_comm.simulator.rendezvous import Call, Operation
from ulysses_comm.simulator.text import describe

Tensors = Sequence[torch.Tensor]
_Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_COMBINE: dict[str, _Combine] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
_COMBINE_BOOL: dict[str, _Combine] = _COMBINE | {
    "SUM": torch.logical_or,
    "PRODUCT": torch.logical_and,
}


def reduce_op_name(op: Any, tensors: Tensors) -> str:
    """Name a reduce op, and check that it fits the tensors.

    Raises:
        ValueError: If the simulator does not know the op, or it makes no sense for the dtype.
    """
    # ReduceOp objects print as addresses and compare equal to the enum's members.
    name = next((name for name in _COMBINE if op == getattr(dist.ReduceOp, name)), None)
    if name is None:
        raise ValueError(
            f"the simulator does not know the reduce op {op!r}; it knows {', '.join(_COMBINE)}"
        )
    for tensor in tensors:
        number = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        if name == "AVG" and not number:
            raise ValueError(f"ReduceOp.AVG of {tensor.dtype} would round; use SUM and divide")
        if name in ("BAND", "BOR", "BXOR") and number:
            raise ValueError(f"ReduceOp.{name} needs an integer or bool dtype, not {tensor.dtype}")
        if name in ("MIN", "MAX") and tensor.dtype.is_complex:
            raise ValueError(f"ReduceOp.{name} has no meaning for {tensor.dtype}")
    return name


def combine(name: str, tensors: Tensors) -> torch.Tensor:
    """Combine one tensor per rank; the result may be the first of them if it is alone."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    dtype = first.dtype
    small = dtype.is_floating_point and dtype.itemsize <= 2
    table = _COMBINE_BOOL if dtype == torch.bool else _COMBINE
    total = first.float() if small else first
    for tensor in tensors[1:]:
        tensor = tensor.to(total.device)
        total = table[name](total, tensor.float() if small else tensor)
    if name == "AVG":
        total = total / len(tensors)
    return total.to(dtype)


def balanced_sizes(total: int, parts: int) -> list[int]:
    """Split a number of elements as evenly as possible, the first parts being the larger ones."""
    return [total // parts + (part < total % parts) for part in range(parts)]


def all_reduce(rank: int, tensors: Tensors, op: Any) -> Call:
    """Check one rank's arguments of all_reduce, or of several coalesced ones."""
    arguments.require_dense_in_any_order("all_reduce", tensors)
    facts = (reduce_op_name(op, tensors), *arguments.facts_of(tensors))
    return Call(rank, facts, list(tensors), list(tensors))


def reduce(rank: int, root: int, tensors: Tensors, op: Any) -> Call:
    """Check one rank's arguments of reduce."""
    arguments.require_dense_in_any_order("reduce", tensors)
    facts = (reduce_op_name(op, tensors), *arguments.facts_of(tensors), root)
    return Call(rank, facts, list(tensors), list(tensors) if rank == root else [])


def reduce_scatter_tensor(rank: int, size: int, outputs: Tensors, inputs: Tensors, op: Any) -> Call:
    """Check one rank's arguments of reduce_scatter_tensor, or of several coalesced ones."""
    name = "reduce_scatter_tensor"
    arguments.require_count(name, "output list", outputs, len(inputs))
    for output, input in zip(outputs, inputs, strict=True):
        arguments.require_same_dtype(name, [output, input])
        arguments.require_dense(name, output=output, input=input)
        arguments.require_times(name, ("input", input), ("output", output), size)
    facts = (reduce_op_name(op, inputs), *arguments.facts_of(inputs))
    return Call(rank, facts, list(inputs), list(outputs))


def reduce_scatter(
    rank: int, size: int, outputs: Tensors, inputs: Sequence[Tensors], op: Any
) -> Call:
    """Check one rank's arguments of reduce_scatter."""
    name = "reduce_scatter"
    arguments.require_count(name, "output", outputs, 1)
    sends = list(inputs[0])
    arguments.require_count(name, "input_list", sends, size)
    arguments.require_same_dtype(name, [*outputs, *sends])
    for tensor in (*outputs, *sends):
        arguments.require_dense(name, tensor=tensor)
    if outputs[0].numel() != sends[rank].numel():
        raise ValueError(
            f"{name}: output is {describe(outputs[0])}, but entry {rank} of input_list, "
            f"this rank's share, is {describe(sends[rank])}"
        )
    facts = (reduce_op_name(op, sends), *arguments.facts_of(sends))
    return Call(rank, facts, sends, list(outputs))


def _move_all_reduce(calls: Sequence[Call]) -> None:
    for k in range(len(calls[0].sends)):
        total = combine(_op(calls), [call.sends[k] for call in calls])
        for call in calls:
            call.targets[k].copy_(total)


def _move_reduce(calls: Sequence[Call]) -> None:
    root = calls[_root(calls)]
    for k, target in enumerate(root.targets):
        target.copy_(combine(_op(calls), [call.sends[k] for call in calls]))


def _move_reduce_scatter_tensor(calls: Sequence[Call]) -> None:
    for k in range(len(calls[0].sends)):
        inputs = [call.sends[k].view(len(calls), -1) for call in calls]
        for rank, call in enumerate(calls):
            total = combine(_op(calls), [input[rank] for input in inputs])
            call.targets[k].view(-1).copy_(total)


def _move_reduce_scatter(calls: Sequence[Call]) -> None:
    for rank, call in enumerate(calls):
        total = combine(_op(calls), [other.sends[rank] for other in calls])
        call.targets[0].view(-1).copy_(total.view(-1))


def _op(calls: Sequence[Call]) -> str:
    return str(calls[0].facts[0])


def _root(calls: Sequence[Call]) -> int:
    root = calls[0].facts[-1]
    assert isinstance(root, int)
    return root


def _sent_all_reduce(calls: Sequence[Call]) -> list[list[int]]:
    """Count a direct reduce-scatter followed by a direct all-gather, as docs/simulator.md says."""
    size = len(calls)
    shares = [0] * size
    for tensor in calls[0].sends:
        for rank, count in enumerate(balanced_sizes(tensor.numel(), size)):
            shares[rank] += count * tensor.element_size()
    return [
        [0 if source == d else shares[d] + shares[source] for d in range(size)]
        for source in range(size)
    ]


def _sent_reduce(calls: Sequence[Call]) -> list[list[int]]:
    root = _root(calls)
    return [
        [sum(map(nbytes, call.sends)) if d == root != rank else 0 for d in range(len(calls))]
        for rank, call in enumerate(calls)
    ]


def _sent_reduce_scatter_tensor(calls: Sequence[Call]) -> list[list[int]]:
    return [[sum(map(nbytes, call.sends)) // len(calls)] * len(calls) for call in calls]


def _sent_reduce_scatter(calls: Sequence[Call]) -> list[list[int]]:
    return [[nbytes(send) for send in call.sends] for call in calls]


_FACTS = ("reduce op", "dtype", "shape", "device")
ALL_REDUCE = Operation("all_reduce", _FACTS, _move_all_reduce, _sent_all_reduce)
REDUCE = Operation("reduce", (*_FACTS, "root"), _move_reduce, _sent_reduce)
REDUCE_SCATTER_TENSOR = Operation(
    "reduce_scatter_tensor", _FACTS, _move_reduce_scatter_tensor, _sent_reduce_scatter_tensor
)
REDUCE_SCATTER = Operation("reduce_scatter", _FACTS, _move_reduce_scatter, _sent_reduce_scatter)
