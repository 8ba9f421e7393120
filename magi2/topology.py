"""Which ranks share a sequence, which share the experts, and which run the other branch.

    world     = cfg branches x sequence ranks
    sequence  = runs of consecutive ranks, each of which holds all experts once

Expert parallelism lies inside the sequence group and never multiplies the ranks. A topology of
several ranks is made by all of them together, before the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ulysses_comm import LONE_RANK, Group
from ulysses_comm.group import rank_and_world_size, resolve_group


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The groups of one rank.

    Args:
        sequence_group: Ranks that share the tokens of a request.
        expert_group: Ranks of the sequence group that share the heads of the expert mixture.
        expert_ranks: Place in the sequence group of each member of the expert group, in its order.
        cfg_group: Ranks, one of each sequence group, that run the branches of guidance.

    Raises:
        ValueError: If the expert ranks are no equal part of the sequence group with this rank in
            its place.
    """

    sequence_group: Group = LONE_RANK
    expert_group: Group = LONE_RANK
    expert_ranks: tuple[int, ...] = (0,)
    cfg_group: Group = LONE_RANK

    def __post_init__(self) -> None:
        rank, world_size = _place(self.sequence_group)
        expert_rank, expert_size = _place(self.expert_group)
        ranks = self.expert_ranks
        if len(ranks) != expert_size or world_size % expert_size:
            raise ValueError(
                f"expert_ranks={ranks} for an expert group of {expert_size} in a sequence group "
                f"of {world_size}: expected one sequence rank for each member, and a size that "
                f"divides {world_size}."
            )
        inside = all(0 <= other < world_size for other in ranks)
        if not inside or len(set(ranks)) != len(ranks) or ranks[expert_rank] != rank:
            raise ValueError(
                f"expert_ranks={ranks} on sequence rank {rank}, which is member {expert_rank} of "
                f"its expert group: expected distinct ranks of the sequence group, from 0 to "
                f"{world_size - 1}, with this one in its place. An expert group must lie inside "
                "the sequence group."
            )

    @property
    def sequence_rank(self) -> int:
        """This rank's place among those that share the tokens."""
        return _place(self.sequence_group)[0]

    @property
    def sequence_size(self) -> int:
        """Ranks that share the tokens."""
        return _place(self.sequence_group)[1]

    @property
    def expert_rank(self) -> int:
        """This rank's place among those that share the experts."""
        return _place(self.expert_group)[0]

    @property
    def expert_size(self) -> int:
        """Ranks that share the experts."""
        return _place(self.expert_group)[1]

    @property
    def expert_runs(self) -> int:
        """Runs of the sequence group that each hold all experts, in the same order on each.

        1 where the expert group is no such run: it takes the whole sequence group, is one rank, or
        its ranks are not consecutive. The same on all ranks if all their groups are runs or none
        is, as where `of_mesh` makes them.
        """
        first, size = self.expert_ranks[0], self.expert_size
        is_run = self.expert_ranks == tuple(range(first, first + size)) and first % size == 0
        return self.sequence_size // size if is_run and size > 1 else 1

    @property
    def cfg_rank(self) -> int:
        """The branch that this rank runs, where branches have their own ranks."""
        return _place(self.cfg_group)[0]

    @property
    def cfg_size(self) -> int:
        """Groups of ranks that run branches; 1 runs all branches packed in one sequence."""
        return _place(self.cfg_group)[1]

    def local_heads(self, num_heads: int, expert_rank: int | None = None) -> range:
        """Heads of the mixture that an expert rank holds; none where others take them all.

        Heads go to expert ranks in runs of `ceil(num_heads / expert_size)`. None is this rank.
        """
        run = heads_per_rank(num_heads, self.expert_size)
        place = self.expert_rank if expert_rank is None else expert_rank
        start = min(place * run, num_heads)
        return range(start, min(start + run, num_heads))

    @classmethod
    def of_group(cls, group: Group, *, shard_experts: bool = True) -> Topology:
        """One sequence group, with the experts spread over all of it or whole on every rank."""
        rank, world_size = _place(group)
        if shard_experts:
            return cls(
                sequence_group=group, expert_group=group, expert_ranks=tuple(range(world_size))
            )
        return cls(sequence_group=group, expert_ranks=(rank,))

    @classmethod
    def of_mesh(
        cls,
        mesh: DeviceMesh,
        *,
        sequence: str = "sequence",
        cfg: str | None = None,
        expert_size: int | None = None,
        num_expert_heads: int | None = None,
    ) -> Topology:
        """Take the groups from a device mesh.

        Args:
            mesh: Of the axes named below and no others: all ranks of the world, or those of one
                replica, as slices of a larger mesh are.
            sequence: Axis that shares the tokens.
            cfg: Axis of the guidance branches, of size 1 or 2; None for packed branches.
            expert_size: Ranks that share the experts, consecutive on the sequence axis; None for
                the whole axis, or what num_expert_heads gives.
            num_expert_heads: Heads of the mixture. If given, expert_size=None is the largest size
                that leaves no head to pad: 4 for 12 heads on 8 ranks. The whole axis would use less
                memory and leave ranks 6 and 7 without a head.

        Raises:
            ValueError: If the mesh has other axes, or expert_size does not divide the sequence
                axis. The same on every rank.

        Where the experts take a part of the sequence axis, this makes the group for it: all ranks
        of that part must call it.
        """
        axes = [axis for axis in (cfg, sequence) if axis is not None]
        names = mesh.mesh_dim_names or ()
        if sorted(names) != sorted(axes):
            raise ValueError(
                f"mesh has axes {names}: expected {tuple(axes)}. Name other axes with sequence= "
                "and cfg=, and give data-parallel replicas meshes of their own."
            )
        sizes = dict(zip(names, mesh.mesh.shape, strict=True))
        sequence_size, cfg_size = sizes[sequence], 1 if cfg is None else sizes[cfg]
        if cfg_size not in (1, 2):
            raise ValueError(
                f"axis {cfg!r} has {cfg_size} ranks: expected 2, the conditional and the "
                "unconditional branch, or 1."
            )
        usable = usable_group_sizes(sequence_size)
        if expert_size is None:
            expert_size = usable_group_sizes(sequence_size, num_expert_heads)[-1]
        if isinstance(expert_size, bool) or expert_size not in usable:
            raise ValueError(
                f"expert_size={expert_size!r} does not divide the {sequence_size} ranks of axis "
                f"{sequence!r}: expected equal runs inside the sequence group. Use one of {usable}."
            )
        sequence_group = mesh.get_group(sequence)
        first = sequence_group.rank() // expert_size * expert_size
        expert_ranks = tuple(range(first, first + expert_size))
        return cls(
            sequence_group=sequence_group,
            expert_group=_expert_group(sequence_group, expert_ranks),
            expert_ranks=expert_ranks,
            cfg_group=LONE_RANK if cfg is None else mesh.get_group(cfg),
        )


def usable_group_sizes(number: int, other: int | None = None) -> list[int]:
    """Sizes that divide a number of ranks or heads, and another if given, in ascending order."""
    sizes = [size for size in range(1, number + 1) if number % size == 0]
    return [size for size in sizes if other is None or other % size == 0]


def heads_per_rank(num_heads: int, expert_size: int) -> int:
    """Heads that each expert rank has in an exchange, the last ones of them perhaps padding."""
    return -(-num_heads // expert_size)


def _place(group: Group) -> tuple[int, int]:
    return rank_and_world_size(resolve_group(group))


def _expert_group(sequence_group: dist.ProcessGroup, expert_ranks: tuple[int, ...]) -> Group:
    if len(expert_ranks) == sequence_group.size():
        return sequence_group
    if len(expert_ranks) == 1:
        return LONE_RANK
    world_ranks = dist.get_process_group_ranks(sequence_group)
    # Among its members only: other replicas of the model have meshes of their own and make other
    # groups, so that no order of all groups exists that all ranks of the world could follow.
    own = dist.new_group(
        [world_ranks[rank] for rank in expert_ranks], use_local_synchronization=True
    )
    assert isinstance(own, dist.ProcessGroup)
    return own
