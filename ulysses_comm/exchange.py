"""The two exchanges of Ulysses sequence parallelism, around attention.

Before attention, ranks trade their tokens of all heads for all tokens of their heads; after it,
back. Both are one all-to-all. `docs/layouts.md` draws the buffers.

Source: DeepSpeed-Ulysses, arXiv:2309.14509.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from ulysses_comm.agreement import agree
from ulysses_comm.byte_rows import ByteRows
from ulysses_comm.collective import all_to_all_rows, is_tracked
from ulysses_comm.copies import copy_head_shards
from ulysses_comm.group import Group, rank_and_world_size, resolve_group
from ulysses_comm.head_shards import (
    as_send_buffer,
    concatenate_head_shards,
    flatten_head_shards,
    split_send_buffer,
)
from ulysses_comm.layout import (
    HeadScatter,
    check_head_scatter,
    check_seqlen_scatter,
    shares_memory,
)


def scatter_heads_gather_seqlen(
    tensors: Sequence[torch.Tensor],
    split_sizes: Sequence[int],
    group: Group,
    *,
    keep_dtypes: bool = False,
    validate: bool | timedelta = False,
) -> list[torch.Tensor]:
    """Trade one sequence shard of every head for the whole sequence of this rank's heads.

    Args:
        tensors: Q, K, V or any others, each (seqlen_local, world_size * num_heads_local, head_dim)
            with any strides, or head shards (seqlen_local, world_size, num_heads_local, head_dim).
            Head counts and dtypes may differ.
        split_sizes: Tokens each rank owns, in rank order; zero is allowed.
        group: The ranks that share the sequence: a process group, a 1-D device mesh, None for the
            default group (a lone rank where torch.distributed is not initialised), or `LONE_RANK`.
        keep_dtypes: Send the bytes of each input as they are, still in one collective, and give
            each result its input's dtype, instead of promoting all. head_dim may then differ.
        validate: Let the ranks compare what they mean to exchange before anything is sent; a
            timedelta sets how long to wait for them. Needs no collective; costs a few round trips
            to the group's store. The environment's ULYSSES_COMM_VALIDATE=1 turns it on everywhere.

    Returns:
        For each input the view (seqlen, num_heads_local, head_dim) of one receive buffer (seqlen,
        sum of num_heads_local, head_dim); tokens in global order. A lone rank gets its 3-D inputs
        back as they are, and head shards as 3-D views.

    Raises:
        ValueError: For bad input, on the rank at fault, before anything is sent.
        RankDisagreementError: If validate is on and the ranks disagree or one is missing.

    One all-to-all. Head shards that tile one send buffer (`pack_head_shards`) are sent as they lie;
    anything else, inputs that autograd tracks included, is copied once into a send buffer.
    """
    process_group = resolve_group(group)
    rank, world_size = rank_and_world_size(process_group)
    checked = agree(
        lambda: check_head_scatter(tensors, split_sizes, rank, world_size, keep_dtypes=keep_dtypes),
        process_group,
        validate,
    )
    if not checked.shards:
        return []
    if process_group is None or world_size == 1:
        return [tensor if tensor.dim() == 3 else tensor.flatten(1, 2) for tensor in tensors]
    _record_copy(process_group, checked.copied_bytes, after=False)
    if checked.is_uniform:
        return _exchange_uniform(checked, process_group)
    return _exchange_bytes(checked, process_group)


def scatter_seqlen_gather_head_shards(
    tensor: torch.Tensor,
    split_sizes: Sequence[int],
    group: Group,
    *,
    validate: bool | timedelta = False,
) -> torch.Tensor:
    """Trade the whole sequence of this rank's heads for this rank's tokens, as head shards.

    Args:
        tensor: The attention output (seqlen, num_heads_local, head_dim), contiguous, any dtype.
        split_sizes: Tokens each rank owns, in rank order; zero is allowed.
        group: As in `scatter_heads_gather_seqlen`.
        validate: As in `scatter_heads_gather_seqlen`.

    Returns:
        The view (seqlen_local, world_size, num_heads_local, head_dim) of the receive buffer, which
        lies (world_size, seqlen_local, num_heads_local, head_dim); slice [:, r] is what rank r
        computed. A lone rank gets its tensor with an axis of size one.

    Raises:
        ValueError: For bad input, on the rank at fault, before anything is sent.
        RankDisagreementError: If validate is on and the ranks disagree or one is missing.

    One all-to-all; nothing is copied before or after it.
    """
    process_group = resolve_group(group)
    rank, world_size = rank_and_world_size(process_group)
    checked = agree(
        lambda: check_seqlen_scatter(tensor, split_sizes, world_size), process_group, validate
    )
    if process_group is None or world_size == 1:
        return tensor.unsqueeze(1)
    seqlen_local = checked.split_sizes[rank]
    received = all_to_all_rows(
        tensor, [seqlen_local] * world_size, checked.split_sizes, process_group
    )
    shards: torch.Tensor = received.unflatten(0, (world_size, seqlen_local))
    return shards.transpose(0, 1)


def scatter_seqlen_gather_heads(
    tensor: torch.Tensor,
    split_sizes: Sequence[int],
    group: Group,
    *,
    validate: bool | timedelta = False,
) -> torch.Tensor:
    """Trade the whole sequence of this rank's heads for one sequence shard of every head.

    Args:
        tensor: The attention output (seqlen, num_heads_local, head_dim), contiguous, any dtype.
        split_sizes: Tokens each rank owns, in rank order; zero is allowed.
        group: As in `scatter_heads_gather_seqlen`.
        validate: As in `scatter_heads_gather_seqlen`.

    Returns:
        (seqlen_local, world_size * num_heads_local, head_dim), head order kept. A lone rank gets
        its tensor back.

    Raises:
        ValueError: For bad input, on the rank at fault, before anything is sent.
        RankDisagreementError: If validate is on and the ranks disagree or one is missing.

    One all-to-all, and one copy of what it received; `scatter_seqlen_gather_head_shards` saves it.
    """
    process_group = resolve_group(group)
    shards = scatter_seqlen_gather_head_shards(tensor, split_sizes, group, validate=validate)
    if shards.shape[1] == 1:
        return tensor
    flat = flatten_head_shards(shards)
    if process_group is not None and not shares_memory(flat, shards):
        _record_copy(process_group, flat.nbytes, after=True)
    return flat


def _exchange_uniform(checked: HeadScatter, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Exchange inputs that share one (world_size, tokens, heads, head_dim) send buffer."""
    send = _send_buffer(checked, group)
    world_size, seqlen_local = send.shape[:2]
    received = all_to_all_rows(
        send.flatten(0, 1), checked.split_sizes, [seqlen_local] * world_size, group
    )
    return list(received.split(checked.head_counts, dim=1))


def _send_buffer(checked: HeadScatter, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the send buffer that the inputs tile, or a fresh one with their contents."""
    shards = checked.shards
    in_place = as_send_buffer(shards, shards[0].shape[1])
    if in_place is not None:
        return in_place
    if is_tracked(shards) or torch.compiler.is_compiling():
        send = concatenate_head_shards(shards)
    else:
        seqlen_local, world_size, _, head_dim = shards[0].shape
        send = shards[0].new_empty(
            (world_size, seqlen_local, sum(checked.head_counts), head_dim), dtype=checked.dtypes[0]
        )
        copy_head_shards(split_send_buffer(send, checked.head_counts), shards)
    _record_copy(group, send.nbytes, after=False)
    return send


def _exchange_bytes(checked: HeadScatter, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Exchange inputs of several dtypes or head dims as rows of bytes."""
    shards = checked.shards
    if is_tracked(shards):
        raise RuntimeError(
            f"keep_dtypes=True with dtypes {[str(dtype) for dtype in checked.dtypes]} and head_dim "
            f"{checked.head_dims} carries bytes, through which no gradient flows, but an input "
            "requires grad. Use torch.no_grad(), one dtype and head_dim, or one exchange for each."
        )
    seqlen_local, world_size = shards[0].shape[:2]
    rows = ByteRows.plan(
        checked.dtypes, list(zip(checked.head_counts, checked.head_dims, strict=True))
    )
    send = rows.empty(world_size, seqlen_local, device=shards[0].device)
    copy_head_shards([view.transpose(0, 1) for view in rows.views(send)], shards)
    _record_copy(group, sum(shard.nbytes for shard in shards), after=False)
    received = all_to_all_rows(
        send.flatten(0, 1), checked.split_sizes, [seqlen_local] * world_size, group
    )
    return rows.views(received)


def _record_copy(group: dist.ProcessGroup, nbytes: int, *, after: bool) -> None:
    """Tell a group that keeps a record (a simulated one) of bytes copied around its collective."""
    record = getattr(group, "record_copied_bytes", None)
    if record is not None and nbytes:
        record(nbytes, after=after)
