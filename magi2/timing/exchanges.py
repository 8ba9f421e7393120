"""A request's exchanges, each told to a timer with its name and the bytes that leave this rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from magi2.modules.replicas import ReplicaDispatcher
from magi2.modules.request import RequestPlan
from magi2.modules.sequence import SequenceDispatcher
from ulysses_comm import HeadScatterTarget

# What to enter around an exchange: its name and the bytes that this rank sends to others in it.
Around = Callable[[str, int], AbstractContextManager[None]]

QKV, OUTPUT = "q, k, v to heads", "attention to tokens"
DISPATCH, RETURN = "tokens to experts", "experts to tokens"
RESULT, BRANCHES = "result", "branches"
EXCHANGES = (QKV, OUTPUT, DISPATCH, RETURN, RESULT, BRANCHES)


def watch_exchanges(plan: RequestPlan, around: Around) -> RequestPlan:
    """The same plan, with `around` entered for every exchange; none on a lone rank."""
    experts: SequenceDispatcher | ReplicaDispatcher
    if isinstance(plan.experts, ReplicaDispatcher):
        experts = WatchedReplicas(
            group=plan.experts.group,
            split_sizes=plan.experts.split_sizes,
            num_runs=plan.experts.num_runs,
            around=around,
        )
    else:
        experts = _watched(plan.experts, around, DISPATCH, RETURN, RESULT)
    return dataclasses.replace(
        plan,
        sequence=_watched(plan.sequence, around, QKV, OUTPUT, RESULT),
        branches=_watched(plan.branches, around, QKV, OUTPUT, BRANCHES),
        experts=experts,
    )


def _watched(
    dispatcher: SequenceDispatcher, around: Around, scatter: str, gather: str, whole: str
) -> SequenceDispatcher:
    if dispatcher.world_size == 1:
        return dispatcher
    return WatchedSequence(
        group=dispatcher.group,
        split_sizes=dispatcher.split_sizes,
        around=around,
        names=(scatter, gather, whole),
    )


@dataclass(frozen=True, kw_only=True)
class WatchedSequence(SequenceDispatcher):
    """A dispatcher that says what it sends.

    Args:
        around: Entered around each exchange.
        names: Of tokens to heads, of heads to tokens, and of rows to everyone.
    """

    around: Around = field(compare=False)
    names: tuple[str, str, str]

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """As the base, watched."""
        with self.around(self.names[2], x.nbytes * (self.world_size - 1)):
            return super().gather(x)

    def open_heads(
        self, head_counts: Sequence[int], head_dim: int, like: torch.Tensor
    ) -> HeadScatterTarget | None:
        """None: what is stored straight to other ranks cannot be timed apart from its kernel."""
        return None

    def scatter_heads(
        self, tensors: Sequence[torch.Tensor] | HeadScatterTarget
    ) -> list[torch.Tensor]:
        """As the base, watched."""
        assert not isinstance(tensors, HeadScatterTarget)
        nbytes = sum(x.nbytes for x in tensors)
        with self.around(self.names[0], nbytes - nbytes // self.world_size):
            return super().scatter_heads(tensors)

    def gather_heads(self, x: torch.Tensor) -> torch.Tensor:
        """As the base, watched."""
        with self.around(self.names[1], self._to_others(x)):
            return super().gather_heads(x)

    def gather_head_shards(self, x: torch.Tensor) -> torch.Tensor:
        """As the base, watched."""
        with self.around(self.names[1], self._to_others(x)):
            return super().gather_head_shards(x)

    def _to_others(self, x: torch.Tensor) -> int:
        """Bytes of all rows but this rank's."""
        return _row_bytes(x) * (self.seqlen - self.seqlen_local)


@dataclass(frozen=True, kw_only=True)
class WatchedReplicas(ReplicaDispatcher):
    """The same for the way to experts that several runs of ranks hold.

    Args:
        around: Entered around each exchange.
    """

    around: Around = field(compare=False)

    def scatter_heads(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """As the base, watched."""
        kept = self._own_rows() * sum(_row_bytes(x) for x in tensors) // self.world_size
        with self.around(DISPATCH, sum(x.nbytes for x in tensors) - kept):
            return super().scatter_heads(tensors)

    def gather_heads(self, x: torch.Tensor) -> torch.Tensor:
        """As the base, watched."""
        with self.around(RETURN, x.nbytes - self._own_rows() * _row_bytes(x)):
            return super().gather_heads(x)

    def _own_rows(self) -> int:
        """Rows that this rank has for itself as an owner."""
        rank = self._group.rank()
        return self.parts[rank][rank // self.world_size]


def _row_bytes(x: torch.Tensor) -> int:
    return x[:1].numel() * x.element_size() if len(x) else 0
