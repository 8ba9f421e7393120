"""The all-to-all under every exchange: a plain call, and a functional one for compilers.

No `from __future__ import annotations` here: `torch.library.custom_op` reads the annotations.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ulysses_comm.group import Group, rank_and_world_size, resolve_group
from ulysses_comm.layout import check_split_sizes

# What gloo, NCCL, MCCL and MPI all carry; anything else (float8, complex, int16) goes as bytes.
WIRE_DTYPES = frozenset(
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
    if send.dtype not in WIRE_DTYPES:
        if send.dim() == 1:  # the counts are of elements, and have to stay so
            send, receive = send.unsqueeze(-1), receive.unsqueeze(-1)
        send, receive = _as_bytes(send), _as_bytes(receive)
    work: dist.Work | None = dist.all_to_all_single(
        receive, send, output_rows, input_rows, group=group, async_op=async_op
    )
    return work


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """See a contiguous tensor as bytes, its last dimension as many times longer."""
    # By way of one dimension: where a size is 0 or 1 it may have any stride, and torch sees no
    # bytes in a last dimension of another stride than 1.
    shape = (*tensor.shape[:-1], tensor.shape[-1] * tensor.element_size())
    return tensor.view(-1).view(torch.uint8).view(shape)


def all_to_all_rows(
    send: torch.Tensor, output_rows: list[int], input_rows: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Return what `start_all_to_all` receives, through an operator that compilers trace.

    Torch's own functional collective: compilers keep it even if its result is not read, and keep
    collectives in the order of the graph, with those of other libraries too. An operator of ours
    has neither. As a pure one, Inductor drops and swaps calls by what it knows of this rank's
    sizes, and ranks that came to different conclusions would wait for one another. One with an
    ordered effect cannot be recomputed by an activation checkpoint, is not cached, and is swapped
    all the same: Inductor of torch 2.11 to 2.13 looks up the order of such calls by another name
    than it notes it by.

    Its gradient is the opposite exchange. Only for dtypes in `WIRE_DTYPES`.
    """
    # Brings the gradient's formula; imported here since it takes long.
    import torch.distributed._functional_collectives

    received = torch.ops._c10d_functional.all_to_all_single(
        send.contiguous(), output_rows, input_rows, group.group_name
    )
    waited_for: torch.Tensor = torch.ops._c10d_functional.wait_tensor(received)
    return waited_for


def read_split_sizes(
    split_sizes: torch.Tensor,
    group: Group,
    *,
    tokens: int | None = None,
    seqlen: int | None = None,
) -> list[int]:
    """Read split sizes inside a compiled region that serves every length; once, for all exchanges.

    Needs `torch._dynamo.config.capture_scalar_outputs`. Eager mode gives plain numbers.

    Args:
        split_sizes: (world_size,), int64, on the CPU.
        group: As in `scatter_heads_gather_seqlen`.
        tokens: Tokens that this rank has, to be compared at run time.
        seqlen: Tokens of the whole sequence, to be compared at run time.

    Returns:
        Tokens each rank owns, for the exchanges.

    Raises:
        ValueError: If split_sizes has another shape or dtype; at run time if it contradicts tokens
            or seqlen, or a rank has less than no tokens.

    Assertions of a trace are not enough: torch 2.11 to 2.13 lose those on such numbers on the way
    from Dynamo's graph to the one that runs.
    """
    rank, world_size = rank_and_world_size(resolve_group(group))
    if split_sizes.dtype != torch.int64 or tuple(split_sizes.shape) != (world_size,):
        raise ValueError(
            f"split_sizes is a tensor of shape {tuple(split_sizes.shape)} and {split_sizes.dtype}: "
            f"expected int64 of shape ({world_size},)."
        )
    verified = _verified_split_sizes(
        split_sizes, rank, -1 if tokens is None else tokens, -1 if seqlen is None else seqlen
    )
    return check_split_sizes(verified.tolist(), world_size)


@torch.library.custom_op("ulysses_comm::verified_split_sizes", mutates_args=())
def _verified_split_sizes(
    split_sizes: torch.Tensor, rank: int, tokens: int, seqlen: int
) -> torch.Tensor:
    """Return a copy, so that what is sent depends on the comparison; -1 compares nothing."""
    sizes = split_sizes.tolist()
    if any(size < 0 for size in sizes):
        raise ValueError(f"split_sizes={sizes}: expected token counts of zero or more.")
    if tokens not in (-1, sizes[rank]) or seqlen not in (-1, sum(sizes)):
        found = f"tokens={tokens}" if tokens >= 0 else f"seqlen={seqlen}"
        raise ValueError(
            f"{found}, but split_sizes={sizes}: expected split_sizes[{rank}]={sizes[rank]} tokens "
            f"on this rank, {sum(sizes)} in all."
        )
    return split_sizes.clone()


@_verified_split_sizes.register_fake
def _(split_sizes: torch.Tensor, rank: int, tokens: int, seqlen: int) -> torch.Tensor:
    return torch.empty_like(split_sizes)
