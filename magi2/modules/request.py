"""What every layer needs to know about one request, worked out once before the first layer."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from magi2.checks import describe, whole_numbers
from magi2.modules.modality import ModalityOrder
from magi2.modules.replicas import ReplicaDispatcher
from magi2.modules.sequence import SequenceDispatcher
from magi2.modules.sinks import SinkTotals
from magi2.ops.packed_sequences import PackedSequences


@dataclass(frozen=True, kw_only=True)
class RequestPlan:
    """The layout of one packed request on this rank.

    Args:
        order: Modality order of this rank's tokens.
        rotary: (tokens, 6 * bands) float32 table of this rank's tokens, in packed order.
        cu_seqlens: Ends of the packed sequences that this rank's sequence group runs, from 0.
        branches: The request's split over the groups that run branches of guidance.
        sequence: The split of a branch's tokens over the sequence group.
        experts: The same split over the ranks that share the experts with this one, or over all
            ranks of the sequence group in runs that each hold all experts.

    Raises:
        ValueError: If these contradict each other.
    """

    order: ModalityOrder
    rotary: torch.Tensor
    cu_seqlens: tuple[int, ...]
    branches: SequenceDispatcher
    sequence: SequenceDispatcher
    experts: SequenceDispatcher | ReplicaDispatcher

    def __post_init__(self) -> None:
        rows = self.order.permutation.shape[0]
        for name in ("sequence", "experts"):
            dispatcher: SequenceDispatcher | ReplicaDispatcher = getattr(self, name)
            if dispatcher.seqlen_local != rows:
                raise ValueError(
                    f"{name} gives this rank {dispatcher.seqlen_local} tokens and order {rows}: "
                    "expected the same."
                )
        if self.branches.seqlen_local != self.sequence.seqlen:
            raise ValueError(
                f"branches gives this branch {self.branches.seqlen_local} tokens and sequence "
                f"{self.sequence.seqlen}: expected the same."
            )
        check_cu_seqlens(self.cu_seqlens, self.sequence.seqlen)
        if self.rotary.dim() != 2 or self.rotary.shape[0] != rows or self.rotary.shape[1] % 2:
            raise ValueError(
                f"rotary is {describe(self.rotary)}: expected ({rows}, 6 * bands), one row for "
                "each token of this rank."
            )

    @functools.cached_property
    def packed(self) -> PackedSequences:
        """The sequences of `cu_seqlens`, and what attention kernels need to know of them."""
        return PackedSequences(self.cu_seqlens)

    @functools.cached_property
    def sink_totals(self) -> SinkTotals:
        """What the sinks add in each layer, worked out at the first step."""
        return SinkTotals()


def check_cu_seqlens(cu_seqlens: torch.Tensor | Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """Bring the sequence ends to the host.

    Args:
        cu_seqlens: Ends of the packed sequences: a vector of int32 or int64, or ints.
        num_tokens: Tokens of all sequences together.

    Raises:
        ValueError: If they do not rise from 0 to num_tokens.
    """
    if isinstance(cu_seqlens, torch.Tensor):
        integers = cu_seqlens.dtype in (torch.int32, torch.int64)
        if cu_seqlens.dim() != 1 or not integers or cu_seqlens.is_meta:
            raise ValueError(
                f"cu_seqlens is {describe(cu_seqlens)} on {cu_seqlens.device}: expected a vector "
                "of int32 or int64 that holds data."
            )
        cu_seqlens = cu_seqlens.tolist()
    ends = whole_numbers("cu_seqlens", cu_seqlens)
    rising = all(before <= after for before, after in pairwise(ends))
    if len(ends) < 2 or ends[0] != 0 or ends[-1] != num_tokens or not rising:
        raise ValueError(
            f"cu_seqlens={list(ends)} does not cover the tokens: expected numbers that start at "
            f"0, never fall, and end at {num_tokens}, the tokens of the packed input."
        )
    return ends


def branch_ends(
    cu_seqlens: tuple[int, ...], branch: int, num_branches: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Divide packed sequences among branches, in equal runs.

    Args:
        cu_seqlens: Ends of all packed sequences, from 0.
        branch: Whose ends to return.
        num_branches: Runs to make.

    Returns:
        The branch's own ends, from 0, and the tokens of every branch.

    Raises:
        ValueError: If the sequences do not divide.
    """
    num_sequences = len(cu_seqlens) - 1
    if num_sequences % num_branches:
        raise ValueError(
            f"{num_sequences} packed sequences do not divide among {num_branches} branches: "
            "expected as many unconditional sequences as conditional ones, and no padding."
        )
    run = num_sequences // num_branches
    own = cu_seqlens[branch * run : (branch + 1) * run + 1]
    starts = cu_seqlens[::run]
    return tuple(end - own[0] for end in own), tuple(b - a for a, b in pairwise(starts))
