"""The way to the experts over all ranks of a sequence, where several runs of them hold all experts.

A sequence of eight ranks with experts in runs of four, [0-3] and [4-7]: ranks 0 and 4 hold the same
heads of the mixture. Instead of each run exchanging among itself, every rank cuts its tokens into
two contiguous parts; part 0 of all ranks goes to the first run, part 1 to the second.

    send buffer    [part, head shard, tokens of the part]: blocks in the order of the owners' ranks
    an owner gets  its part of every rank, in rank order, of the heads that it holds
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from magi2.checks import whole_numbers
from magi2.modules.sequence import SequenceDispatcher
from magi2.topology import Topology
from ulysses_comm import Group, balanced_split_sizes
from ulysses_comm.collective import all_to_all_rows
from ulysses_comm.group import rank_and_world_size, resolve_group
from ulysses_comm.transfer import record_copy


@dataclass(frozen=True, kw_only=True)
class ReplicaDispatcher:
    """Stands in for a run's `SequenceDispatcher` on the way to the experts and back.

    Args:
        group: The ranks that share the tokens, which are num_runs runs of the ranks that hold all
            experts once, each run in the same order.
        split_sizes: Tokens of each rank of the group, in rank order; zero is allowed.
        num_runs: How many runs.

    Raises:
        ValueError: If the group is not made of num_runs runs of two ranks or more, or there is not
            one size of zero or more for each of its ranks.
    """

    group: Group
    split_sizes: tuple[int, ...]
    num_runs: int

    def __post_init__(self) -> None:
        ranks = rank_and_world_size(resolve_group(self.group))[1]
        sizes = _check_runs(self.split_sizes, self.num_runs)
        if len(sizes) != ranks:
            raise ValueError(
                f"split_sizes={list(sizes)}: expected {ranks} integers of zero or more, the tokens "
                "of each rank of the group."
            )
        if self.world_size < 2:
            raise ValueError(
                f"num_runs={self.num_runs} of {ranks} ranks are runs of one rank: expected two "
                "ranks or more in each. A rank that holds all experts has nothing to exchange."
            )

    @property
    def rank(self) -> int:
        """This rank's place in its run."""
        return self._group.rank() % self.world_size

    @property
    def world_size(self) -> int:
        """Ranks of a run: those that hold all experts once."""
        return len(self.split_sizes) // self.num_runs

    @property
    def seqlen_local(self) -> int:
        """Tokens of this rank."""
        return self.split_sizes[self._group.rank()]

    @functools.cached_property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        """Tokens that each rank of the group, in rank order, sends to each run."""
        return part_sizes(self.split_sizes, self.num_runs)

    def scatter_heads(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Local tokens of all heads to this run's part of all tokens, of this rank's heads.

        Args:
            tensors: Each (seqlen_local, heads, head_dim), heads a multiple of world_size.

        Returns:
            For each (tokens of all ranks' part, heads / world_size, head_dim).

        One all-to-all over the whole group for each tensor, and a copy into its send buffer.
        """
        sent, received = self._rows()
        results = []
        for tensor in tensors:
            send = self._pack(tensor)
            record_copy(self._group, send.nbytes, after=False)
            results.append(all_to_all_rows(send, received, sent, self._group))
        return results

    def gather_heads(self, x: torch.Tensor) -> torch.Tensor:
        """What `scatter_heads` returned, back to local tokens of all heads: (local, heads, dim).

        One all-to-all over the whole group, and a copy of what it received.
        """
        received, sent = self._rows()
        result = self._unpack(all_to_all_rows(x.contiguous(), received, sent, self._group))
        record_copy(self._group, result.nbytes, after=True)
        return result

    @property
    def _group(self) -> dist.ProcessGroup:
        group = resolve_group(self.group)
        assert group is not None  # a lone rank is no run of two
        return group

    def _rows(self) -> tuple[list[int], list[int]]:
        """Rows from this rank to every owner and from every rank to this owner, on the way there.

        Every rank works them out from all split sizes: none is exchanged.
        """
        rank, run_size = self._group.rank(), self.world_size
        sent = [size for size in self.parts[rank] for _ in range(run_size)]
        return sent, [parts[rank // run_size] for parts in self.parts]

    def _pack(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, heads, dim) to (rows, heads / world_size, dim), a row for a token and shard."""
        shard = x.shape[1] // self.world_size
        by_part = x.split(self.parts[self._group.rank()])
        return torch.cat([block for part in by_part for block in part.split(shard, dim=1)])

    def _unpack(self, rows: torch.Tensor) -> torch.Tensor:
        """Undo `_pack`."""
        run_size, sizes = self.world_size, self.parts[self._group.rank()]
        by_part = rows.split([size * run_size for size in sizes])
        blocks = [
            part.unflatten(0, (run_size, size)).transpose(0, 1)
            for part, size in zip(by_part, sizes, strict=True)
        ]
        return torch.cat(blocks).flatten(1, 2)


def expert_dispatcher(
    sequence: SequenceDispatcher, topology: Topology, num_runs: int
) -> SequenceDispatcher | ReplicaDispatcher:
    """The way of a request's tokens to the experts and back.

    Args:
        sequence: The split of the tokens over the sequence group of the topology.
        topology: Says who holds the experts.
        num_runs: Runs of ranks to exchange across; 1 for the exchange inside the run.

    Where the runs own unequally many tokens the exchange stays inside the run: parts as unequal as
    the runs would make messages so, and equal ones to all ranks are the point. All ranks of the
    sequence know all its split sizes and come to the same conclusion.
    """
    if num_runs > 1 and len(set(run_totals(sequence.split_sizes, num_runs))) == 1:
        return ReplicaDispatcher(
            group=sequence.group, split_sizes=sequence.split_sizes, num_runs=num_runs
        )
    return SequenceDispatcher(
        group=topology.expert_group,
        split_sizes=tuple(sequence.split_sizes[rank] for rank in topology.expert_ranks),
    )


def run_totals(split_sizes: Sequence[int], num_runs: int) -> list[int]:
    """Tokens that each of num_runs equal runs of consecutive ranks owns.

    Raises:
        ValueError: As `part_sizes`.
    """
    sizes = _check_runs(split_sizes, num_runs)
    run_size = len(sizes) // num_runs
    return [sum(sizes[start : start + run_size]) for start in range(0, len(sizes), run_size)]


def part_sizes(split_sizes: Sequence[int], num_runs: int) -> tuple[tuple[int, ...], ...]:
    """Cut each rank's tokens into a part for each run, so that a run gets as many as its ranks own.

    Parts start even, low ones with the odd token; then tokens move between parts, of leading ranks
    first, until the parts of all ranks add up to the tokens of the run that they go to. An owner
    thus has as many rows as in an exchange inside its run. For (3, 0, 1, 6) and two runs:

        even   (2, 1) (0, 0) (1, 0) (3, 3)    add up to 6 and 4, the runs own 3 and 7
        moved  (0, 3) (0, 0) (0, 1) (3, 3)

    Args:
        split_sizes: Tokens of each rank, in rank order.
        num_runs: Runs of consecutive ranks, equally long.

    Returns:
        For each rank the tokens of its parts, in order.

    Raises:
        ValueError: If split_sizes are not whole numbers of zero or more, or num_runs does not
            divide their number.
    """
    totals = run_totals(split_sizes, num_runs)
    parts = [balanced_split_sizes(size, num_runs) for size in split_sizes]
    surplus = [
        sum(sizes) - total for sizes, total in zip(zip(*parts, strict=True), totals, strict=True)
    ]
    for own in parts:
        for giver, taker in itertools.permutations(range(num_runs), 2):
            moved = max(0, min(own[giver], surplus[giver], -surplus[taker]))
            own[giver] -= moved
            own[taker] += moved
            surplus[giver] -= moved
            surplus[taker] += moved
    assert not any(surplus)
    return tuple(tuple(own) for own in parts)


def _check_runs(split_sizes: Sequence[int], num_runs: int) -> tuple[int, ...]:
    sizes = whole_numbers("split_sizes", split_sizes)
    if not sizes or any(size < 0 for size in sizes):
        raise ValueError(
            f"split_sizes={list(sizes)}: expected integers of zero or more, the tokens of each "
            "rank of the group."
        )
    (runs,) = whole_numbers("num_runs", (num_runs,))
    if runs < 1 or len(sizes) % runs:
        raise ValueError(
            f"num_runs={runs} for the {len(sizes)} ranks of split_sizes: expected equally long "
            f"runs, a number that divides {len(sizes)}."
        )
    return sizes
