"""The all-to-all under every exchange: a plain call, and a registered operator for compilers.

No `from __future__ import annotations` here: `torch.library.custom_op` reads the annotations.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch._library.custom_ops import CustomOpDef
from torch._library.effects import EffectType

# What gloo, NCCL, MCCL and MPI all carry; anything else (float8, complex, int16) goes as bytes.
_WIRE_DTYPES = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
    }
)


def is_tracked(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether autograd would record an operation on any of the tensors."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def start_all_to_all(
    receive: torch.Tensor,
    send: torch.Tensor,
    output_rows: list[int],
    input_rows: list[int],
    group: dist.ProcessGroup,
    *,
    async_op: bool = False,
) -> dist.Work | None:
    """Send `input_rows[r]` rows to each rank r and receive `output_rows[r]` rows from it.

    Args:
        receive: (sum(output_rows), ...), contiguous; filled with rows of rank 0 first.
        send: (sum(input_rows), ...), contiguous, rows for rank 0 first; sent as it lies.
        output_rows: Rows to receive from each rank.
        input_rows: Rows to send to each rank.
        group: The ranks that take part.
        async_op: Return the work under way instead of waiting for it.
    """
    if send.dtype not in _WIRE_DTYPES:
        if send.dim() == 1:  # the counts are of elements, and have to stay so
            send, receive = send.unsqueeze(-1), receive.unsqueeze(-1)
        send, receive = send.view(torch.uint8), receive.view(torch.uint8)
    work: dist.Work | None = dist.all_to_all_single(
        receive, send, output_rows, input_rows, group=group, async_op=async_op
    )
    return work


def all_to_all_rows(
    send: torch.Tensor, output_rows: list[int], input_rows: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Return what `start_all_to_all` receives, through an operator that compilers trace.

    Its gradient is the opposite exchange.
    """
    receive: torch.Tensor = torch.ops.ulysses_comm.all_to_all_rows(
        send, output_rows, input_rows, group.group_name, group.rank()
    )
    return receive


def keep_in_order(operator: CustomOpDef) -> None:
    """Let compilers run an operator exactly as often as it is called, and in that order.

    To a compiler an exchange is a pure function: it would merge two of the same input, drop one
    whose result is not used and swap two that do not depend on each other, each by what it knows of
    this rank's sizes. Ranks that came to different conclusions would wait for one another.
    """
    operator.register_effect(EffectType.ORDERED)


def group_of_graph(name: str, rank: int, world_size: int) -> dist.ProcessGroup:
    """Return the group by whose name a graph was traced.

    Args:
        name: Of the group, in torch's registry.
        rank: This rank in the group, when the graph was traced.
        world_size: Ranks of the group, when the graph was traced.

    Raises:
        RuntimeError: If the name has come to stand for a group of another size, or in which this is
            another rank: offsets in the graph would be another rank's.
    """
    group = _resolve_process_group(name)  # type: ignore[arg-type]  # GroupName from 2.13
    if (group.rank(), group.size()) != (rank, world_size):
        raise RuntimeError(
            f"A compiled exchange of group {name!r} was traced on rank {rank} of {world_size}, but "
            f"is run on rank {group.rank()} of {group.size()}: the group was made anew under the "
            "same name. Call torch.compiler.reset() when groups are made anew."
        )
    return group


@torch.library.custom_op("ulysses_comm::check_tokens", mutates_args=())
def check_tokens(split_sizes: torch.Tensor, tokens: Sequence[int], rank: int) -> None:
    """Compare token counts at run time with the split sizes that a graph reads there.

    Args:
        split_sizes: (world_size,), int64, on the CPU.
        tokens: Of each tensor that is to be exchanged.
        rank: Whose share each of them has to be; -1 for the whole sequence.

    Raises:
        ValueError: If they differ.
    """
    sizes = split_sizes.tolist()
    expected = sum(sizes) if rank < 0 else sizes[rank]
    if any(count != expected for count in tokens):
        share = "their sum" if rank < 0 else f"split_sizes[{rank}]"
        raise ValueError(
            f"A compiled exchange has tensors of {list(tokens)} tokens, but split_sizes={sizes}: "
            f"expected {share}, {expected} tokens."
        )


@check_tokens.register_fake
def _(split_sizes: torch.Tensor, tokens: Sequence[int], rank: int) -> None:
    return None


keep_in_order(check_tokens)


@torch.library.custom_op("ulysses_comm::all_to_all_rows", mutates_args=())
def _operator(
    send: torch.Tensor,
    output_rows: Sequence[int],
    input_rows: Sequence[int],
    group_name: str,
    rank: int,
) -> torch.Tensor:
    group = group_of_graph(group_name, rank, len(output_rows))
    send = send.contiguous().resolve_conj().resolve_neg()
    receive = send.new_empty((sum(output_rows), *send.shape[1:]))
    start_all_to_all(receive, send, list(output_rows), list(input_rows), group)
    return receive


@_operator.register_fake
def _(
    send: torch.Tensor,
    output_rows: Sequence[int],
    input_rows: Sequence[int],
    group_name: str,
    rank: int,
) -> torch.Tensor:
    return send.new_empty((sum(output_rows), *send.shape[1:]))


def _remember_rows(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.output_rows, ctx.input_rows, ctx.group_name, ctx.rank = inputs


def _send_back(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
    sent_back = torch.ops.ulysses_comm.all_to_all_rows(
        grad.contiguous(), ctx.input_rows, ctx.output_rows, ctx.group_name, ctx.rank
    )
    return sent_back, None, None, None, None


_operator.register_autograd(_send_back, setup_context=_remember_rows)
keep_in_order(_operator)
