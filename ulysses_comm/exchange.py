"""The two exchanges of Ulysses sequence parallelism, around attention.

Before attention, ranks trade their tokens of all heads for all tokens of their heads; after it,
back. Both are one all-to-all. `docs/layouts.md` draws the buffers. Each has an asynchronous twin,
`start_...`, that returns a handle.

Source: DeepSpeed-Ulysses, arXiv:2309.14509.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ulysses_comm.agreement import Validate
from ulysses_comm.group import Group
from ulysses_comm.head_split import HeadSplit
from ulysses_comm.launch import (
    launch_scatter_heads,
    launch_scatter_seqlen,
    launch_scatter_seqlen_each,
)
from ulysses_comm.pending import Pending
from ulysses_comm.workspace import Workspace


def scatter_heads_gather_seqlen(
    tensors: Sequence[torch.Tensor],
    split_sizes: Sequence[int],
    group: Group,
    *,
    head_splits: Sequence[HeadSplit] | None = None,
    keep_dtypes: bool = False,
    validate: Validate = False,
    workspace: Workspace | None = None,
    out: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Trade one sequence shard of every head for the whole sequence of this rank's heads.

    Args:
        tensors: Q, K, V or any others, each (seqlen_local, num_heads, head_dim) with any strides,
            or head shards (seqlen_local, world_size, num_heads_local, head_dim). Head counts and
            dtypes may differ.
        split_sizes: Tokens each rank owns, in rank order; zero is allowed.
        group: The ranks that share the sequence: a process group, a 1-D device mesh, None for the
            default group (a lone rank where torch.distributed is not initialised), or `LONE_RANK`.
        head_splits: Which heads of each tensor each rank gets; None for equally many, which
            world_size then has to divide. `split_query_groups` makes them for grouped queries.
        keep_dtypes: Send the bytes of each input as they are, still in one collective, and give
            each result its input's dtype, instead of promoting all. head_dim may then differ.
        validate: Let the ranks compare what they mean to exchange before anything is sent: True at
            every call, a timedelta to set how long to wait, an `Agreement` once for each layout.
            Needs no collective; costs a few round trips to the group's store. The environment's
            ULYSSES_COMM_VALIDATE=1 turns it on everywhere.
        workspace: Where to take the send and receive buffers from, in backward too; None
            allocates them.
        out: The receive buffer to use: (seqlen, heads of this rank over all inputs, head_dim),
            contiguous, of the promoted dtype; (seqlen, bytes of a row) of uint8 for inputs that
            keep several dtypes. Not for inputs that autograd tracks.

    Returns:
        For each input the view (seqlen, num_heads_local, head_dim) of one receive buffer (seqlen,
        sum of num_heads_local, head_dim); tokens in global order. A lone rank gets its 3-D inputs
        back as they are, and head shards as 3-D views.

    Raises:
        ValueError: For bad input, on the rank at fault, before anything is sent.
        RankDisagreementError: If validate is on and the ranks disagree or one is missing.

    One all-to-all. Head shards that tile one send buffer (`pack_head_shards`) are sent as they lie;
    anything else is copied once into a send buffer. Differentiable: backward is the opposite
    exchange.
    """
    return launch_scatter_heads(
        tensors,
        split_sizes,
        group,
        head_splits=head_splits,
        keep_dtypes=keep_dtypes,
        validate=validate,
        workspace=workspace,
        out=out,
        async_op=False,
    ).wait()


def start_scatter_heads_gather_seqlen(
    tensors: Sequence[torch.Tensor],
    split_sizes: Sequence[int],
    group: Group,
    *,
    head_splits: Sequence[HeadSplit] | None = None,
    keep_dtypes: bool = False,
    validate: Validate = False,
    workspace: Workspace | None = None,
    out: torch.Tensor | None = None,
) -> Pending[list[torch.Tensor]]:
    """Start `scatter_heads_gather_seqlen`; `wait()` on the handle returns its result.

    Arguments and errors as there. Inputs must not be written to before `wait()` returns.
    """
    return launch_scatter_heads(
        tensors,
        split_sizes,
        group,
        head_splits=head_splits,
        keep_dtypes=keep_dtypes,
        validate=validate,
        workspace=workspace,
        out=out,
        async_op=True,
    )


def scatter_seqlen_gather_head_shards(
    tensor: torch.Tensor,
    split_sizes: Sequence[int],
    group: Group,
    *,
    validate: Validate = False,
    workspace: Workspace | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Trade the whole sequence of this rank's heads for this rank's tokens, as head shards.

    Args:
        tensor: The attention output (seqlen, num_heads_local, head_dim), contiguous, any dtype.
            Every rank has equally many heads.
        split_sizes: Tokens each rank owns, in rank order; zero is allowed.
        group: As in `scatter_heads_gather_seqlen`.
        validate: As in `scatter_heads_gather_seqlen`.
        workspace: Where to take the buffers from, in backward too; None allocates them.
        out: The receive buffer to use, (world_size, seqlen_local, num_heads_local, head_dim),
            contiguous, of the tensor's dtype. Not for a tensor that autograd tracks.

    Returns:
        The view (seqlen_local, world_size, num_heads_local, head_dim) of the receive buffer, which
        lies (world_size, seqlen_local, num_heads_local, head_dim); slice [:, r] is what rank r
        computed. A lone rank gets its tensor with an axis of size one.

    Raises:
        ValueError: For bad input, on the rank at fault, before anything is sent.
        RankDisagreementError: If validate is on and the ranks disagree or one is missing.

    One all-to-all; nothing is copied before or after it. Differentiable.
    """
    return launch_scatter_seqlen(
        tensor,
        split_sizes,
        group,
        head_split=None,
        as_shards=True,
        validate=validate,
        workspace=workspace,
        out=out,
        async_op=False,
    ).wait()


def start_scatter_seqlen_gather_head_shards(
    tensor: torch.Tensor,
    split_sizes: Sequence[int],
    group: Group,
    *,
    validate: Validate = False,
    workspace: Workspace | None = None,
    out: torch.Tensor | None = None,
) -> Pending[torch.Tensor]:
    """Start `scatter_seqlen_gather_head_shards`; `wait()` on the handle returns its result.

    Arguments and errors as there. The tensor must not be written to before `wait()` returns.
    """
    return launch_scatter_seqlen(
        tensor,
        split_sizes,
        group,
        head_split=None,
        as_shards=True,
        validate=validate,
        workspace=workspace,
        out=out,
        async_op=True,
    )


def scatter_seqlen_gather_heads(
    tensor: torch.Tensor,
    split_sizes: Sequence[int],
    group: Group,
    *,
    head_split: HeadSplit | None = None,
    validate: Validate = False,
    workspace: Workspace | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Trade the whole sequence of this rank's heads for one sequence shard of every head.

    Args:
        tensor: The attention output (seqlen, num_heads_local, head_dim), contiguous, any dtype.
        split_sizes: Tokens each rank owns, in rank order; zero is allowed.
        group: As in `scatter_heads_gather_seqlen`.
        head_split: Which heads each rank has; None if every rank has equally many.
        validate: As in `scatter_heads_gather_seqlen`.
        workspace: Where to take the receive buffer and the result from, and the buffers of
            backward; None allocates them.
        out: The result to write, (seqlen_local, num_heads, head_dim), contiguous, of the tensor's
            dtype. Not for a tensor that autograd tracks.

    Returns:
        (seqlen_local, num_heads, head_dim), head order kept; heads that several ranks have are
        summed. A lone rank gets its tensor back.

    Raises:
        ValueError: For bad input, on the rank at fault, before anything is sent.
        RankDisagreementError: If validate is on and the ranks disagree or one is missing.

    One all-to-all, and one copy of what it received; `scatter_seqlen_gather_head_shards` saves it.
    Differentiable.
    """
    return launch_scatter_seqlen(
        tensor,
        split_sizes,
        group,
        head_split=head_split,
        as_shards=False,
        validate=validate,
        workspace=workspace,
        out=out,
        async_op=False,
    ).wait()


def start_scatter_seqlen_gather_heads(
    tensor: torch.Tensor,
    split_sizes: Sequence[int],
    group: Group,
    *,
    head_split: HeadSplit | None = None,
    validate: Validate = False,
    workspace: Workspace | None = None,
    out: torch.Tensor | None = None,
) -> Pending[torch.Tensor]:
    """Start `scatter_seqlen_gather_heads`; `wait()` on the handle returns its result.

    Arguments and errors as there. The tensor must not be written to before `wait()` returns.
    """
    return launch_scatter_seqlen(
        tensor,
        split_sizes,
        group,
        head_split=head_split,
        as_shards=False,
        validate=validate,
        workspace=workspace,
        out=out,
        async_op=True,
    )


def scatter_seqlen_gather_heads_each(
    tensors: Sequence[torch.Tensor],
    split_sizes: Sequence[int],
    group: Group,
    *,
    head_splits: Sequence[HeadSplit] | None = None,
    keep_dtypes: bool = False,
    validate: Validate = False,
    workspace: Workspace | None = None,
    out: Sequence[torch.Tensor] | None = None,
) -> list[torch.Tensor]:
    """Do `scatter_seqlen_gather_heads` for several tensors in one collective.

    Args:
        tensors: Such as the attention output and its log-sum-exp, each (seqlen, num_heads_local,
            head_dim) with any strides.
        split_sizes: Tokens each rank owns, in rank order; zero is allowed.
        group: As in `scatter_heads_gather_seqlen`.
        head_splits: Which heads of each tensor each rank has; None if every rank has equally many.
        keep_dtypes: Send the bytes of each tensor as they are and give each result its tensor's
            dtype, instead of promoting all. head_dim may then differ.
        validate: As in `scatter_heads_gather_seqlen`.
        workspace: Where to take the buffers and the results from, in backward too; None
            allocates them.
        out: The results to write, one (seqlen_local, num_heads, head_dim) for each tensor,
            contiguous. Not for tensors that autograd tracks.

    Returns:
        For each tensor (seqlen_local, num_heads, head_dim), head order kept; heads that several
        ranks have are summed. A lone rank gets its tensors back, in the promoted dtype.

    Raises:
        ValueError: For bad input, on the rank at fault, before anything is sent.
        RankDisagreementError: If validate is on and the ranks disagree or one is missing.

    One all-to-all, one copy after it, and one before it unless the tensors lie side by side on the
    head axis of one buffer. Differentiable.
    """
    return launch_scatter_seqlen_each(
        tensors,
        split_sizes,
        group,
        head_splits=head_splits,
        keep_dtypes=keep_dtypes,
        as_shards=False,
        validate=validate,
        workspace=workspace,
        out=out,
        async_op=False,
    ).wait()


def start_scatter_seqlen_gather_heads_each(
    tensors: Sequence[torch.Tensor],
    split_sizes: Sequence[int],
    group: Group,
    *,
    head_splits: Sequence[HeadSplit] | None = None,
    keep_dtypes: bool = False,
    validate: Validate = False,
    workspace: Workspace | None = None,
    out: Sequence[torch.Tensor] | None = None,
) -> Pending[list[torch.Tensor]]:
    """Start `scatter_seqlen_gather_heads_each`; `wait()` on the handle returns its results.

    Arguments and errors as there. The tensors must not be written to before `wait()` returns.
    """
    return launch_scatter_seqlen_each(
        tensors,
        split_sizes,
        group,
        head_splits=head_splits,
        keep_dtypes=keep_dtypes,
        as_shards=False,
        validate=validate,
        workspace=workspace,
        out=out,
        async_op=True,
    )
