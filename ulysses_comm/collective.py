"""The all-to-all of rows that every exchange makes, in a plain and in a differentiable form.

No `from __future__ import annotations` here: `torch.library.custom_op` reads the annotations.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group

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


def all_to_all_rows(
    send: torch.Tensor,
    output_rows: list[int],
    input_rows: list[int],
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """Send `input_rows[r]` rows to each rank r and receive `output_rows[r]` from it.

    Args:
        send: (sum(input_rows), ...), contiguous, rows for rank 0 first.
        output_rows: Rows to receive from each rank.
        input_rows: Rows to send to each rank.
        group: The ranks that take part.

    Returns:
        (sum(output_rows), ...), a new contiguous tensor, rows of rank 0 first.

    One collective; `send` is handed to it as it lies. A tensor that autograd tracks goes through a
    registered operator, whose gradient is the opposite exchange; so does a traced one.
    """
    if is_tracked([send]) or torch.compiler.is_compiling():
        receive: torch.Tensor = torch.ops.ulysses_comm.all_to_all_rows(
            send, output_rows, input_rows, group.group_name
        )
        return receive
    return _all_to_all_rows(send, output_rows, input_rows, group)


def _all_to_all_rows(
    send: torch.Tensor,
    output_rows: Sequence[int],
    input_rows: Sequence[int],
    group: dist.ProcessGroup,
) -> torch.Tensor:
    send = send.resolve_conj().resolve_neg()
    receive = send.new_empty((sum(output_rows), *send.shape[1:]))
    source, target = send, receive
    if send.dtype not in _WIRE_DTYPES:
        source, target = send.view(torch.uint8), receive.view(torch.uint8)
    dist.all_to_all_single(
        target, source, list(output_rows), list(input_rows), group=group, async_op=False
    )
    return receive


@torch.library.custom_op("ulysses_comm::all_to_all_rows", mutates_args=())
def _operator(
    send: torch.Tensor, output_rows: Sequence[int], input_rows: Sequence[int], group_name: str
) -> torch.Tensor:
    group = _resolve_process_group(group_name)  # type: ignore[arg-type]  # GroupName from 2.13
    return _all_to_all_rows(send.contiguous(), output_rows, input_rows, group)


@_operator.register_fake
def _(
    send: torch.Tensor, output_rows: Sequence[int], input_rows: Sequence[int], group_name: str
) -> torch.Tensor:
    return send.new_empty((sum(output_rows), *send.shape[1:]))


def _remember_rows(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.output_rows, ctx.input_rows, ctx.group_name = inputs


def _send_back(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    sent_back = torch.ops.ulysses_comm.all_to_all_rows(
        grad.contiguous(), ctx.input_rows, ctx.output_rows, ctx.group_name
    )
    return sent_back, None, None, None


_operator.register_autograd(_send_back, setup_context=_remember_rows)
