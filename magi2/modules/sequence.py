"""One request's tokens over a group of ranks: who owns which, and how they are traded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from magi2.checks import whole_numbers
from ulysses_comm import (
    LONE_RANK,
    Group,
    HeadScatterTarget,
    balanced_split_sizes,
    open_head_scatter,
    scatter_heads_gather_seqlen,
    scatter_seqlen_gather_head_shards,
    scatter_seqlen_gather_heads,
    transport_of,
)
from ulysses_comm.group import rank_and_world_size, resolve_group


@dataclass(frozen=True, kw_only=True)
class SequenceDispatcher:
    """The split of one request, held in one place: every exchange of a forward goes through it.

    Args:
        group: The ranks that share the tokens.
        split_sizes: Tokens of each rank, in rank order; zero is allowed.

    Raises:
        ValueError: If there is not one size of zero or more for each rank of the group.
    """

    group: Group = LONE_RANK
    split_sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        sizes = whole_numbers("split_sizes", self.split_sizes)
        if len(sizes) != self.world_size or any(size < 0 for size in sizes):
            raise ValueError(
                f"split_sizes={list(sizes)}: expected {self.world_size} integers of zero or more, "
                "the tokens of each rank of the group."
            )

    @classmethod
    def of(
        cls, group: Group, seqlen: int, split_sizes: Sequence[int] | None = None
    ) -> SequenceDispatcher:
        """Split seqlen tokens as given, or as evenly as can be.

        Raises:
            ValueError: As the class does, or if the sizes do not add up to seqlen.
        """
        if split_sizes is None:
            world_size = rank_and_world_size(resolve_group(group))[1]
            split_sizes = balanced_split_sizes(seqlen, world_size)
        dispatcher = cls(group=group, split_sizes=whole_numbers("split_sizes", split_sizes))
        if dispatcher.seqlen != seqlen:
            raise ValueError(
                f"split_sizes={list(dispatcher.split_sizes)} add up to {dispatcher.seqlen}: "
                f"expected {seqlen}, the tokens of the request."
            )
        return dispatcher

    @property
    def rank(self) -> int:
        """This rank's place in the group."""
        return rank_and_world_size(resolve_group(self.group))[0]

    @property
    def world_size(self) -> int:
        """Ranks of the group."""
        return rank_and_world_size(resolve_group(self.group))[1]

    @property
    def seqlen(self) -> int:
        """Tokens of all ranks."""
        return sum(self.split_sizes)

    @property
    def seqlen_local(self) -> int:
        """Tokens of this rank."""
        return self.split_sizes[self.rank]

    def shard(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a tensor that every rank holds whole; a view, nothing is sent."""
        start = sum(self.split_sizes[: self.rank])
        return x[start : start + self.seqlen_local]

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """All ranks' rows of (seqlen_local, columns), on every rank: (seqlen, columns).

        One all-to-all in which each rank sends its rows to every other.
        """
        if self.world_size == 1:
            return x
        copies = x.unsqueeze(1).expand(-1, self.world_size, -1)
        return scatter_heads_gather_seqlen([copies], self.split_sizes, self.group)[0].squeeze(1)

    def open_heads(
        self, head_counts: Sequence[int], head_dim: int, like: torch.Tensor
    ) -> HeadScatterTarget | None:
        """Where a kernel stores heads, rather than to tensors that are then exchanged.

        Args:
            head_counts: Heads of each tensor, of all ranks.
            head_dim: Channels of a head.
            like: Of their dtype and device.

        Returns:
            What `scatter_heads` takes, the group's next exchange; None where the ranks cannot store
            into one another's memory.
        """
        if transport_of(self.group) == "collective":
            return None
        sizes, dtype, device = self.split_sizes, like.dtype, like.device
        return open_head_scatter(head_counts, head_dim, dtype, sizes, self.group, device=device)

    def scatter_heads(
        self, tensors: Sequence[torch.Tensor] | HeadScatterTarget
    ) -> list[torch.Tensor]:
        """Local tokens of all heads to all tokens of this rank's heads, in one exchange.

        Args:
            tensors: Each (seqlen_local, heads, head_dim), or head shards of one send buffer; or
                what `open_heads` returned, with all heads stored.

        Returns:
            For each (seqlen, heads / world_size, head_dim).
        """
        if isinstance(tensors, HeadScatterTarget):
            return tensors.finish()
        return scatter_heads_gather_seqlen(tensors, self.split_sizes, self.group)

    def gather_heads(self, x: torch.Tensor) -> torch.Tensor:
        """All tokens of this rank's heads to local tokens of all heads: (local, heads, dim)."""
        return scatter_seqlen_gather_heads(x, self.split_sizes, self.group)

    def gather_head_shards(self, x: torch.Tensor) -> torch.Tensor:
        """As `gather_heads`, but as received: (local, world_size, heads / world_size, dim)."""
        return scatter_seqlen_gather_head_shards(x, self.split_sizes, self.group)
