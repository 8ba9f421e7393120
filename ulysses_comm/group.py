"""From what a caller passes as `group` to a process group; nothing else knows the other forms."""

from __future__ import annotations

import enum
from typing import Final, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


class LoneRank(enum.Enum):
    """The type of `LONE_RANK`; an enum, so that `group is LONE_RANK` narrows for type checkers."""

    LONE_RANK = "lone rank"

    def __repr__(self) -> str:
        return "ulysses_comm.LONE_RANK"


LONE_RANK: Final = LoneRank.LONE_RANK
"""Pass as `group` to work alone although torch.distributed runs with several ranks."""

Group: TypeAlias = "dist.ProcessGroup | DeviceMesh | LoneRank | None"
"""What every exchange takes: a process group, a 1-D device mesh, `LONE_RANK`, or None.

None is the default group where torch.distributed is initialised, and a lone rank where it is not;
it never means one rank while several run.
"""


def resolve_group(group: Group) -> dist.ProcessGroup | None:
    """Return the process group that `group` stands for, or None for a lone rank.

    Args:
        group: A process group of any backend, a 1-D `DeviceMesh`, `LONE_RANK`, or None: the default
            group if torch.distributed is initialised, else a lone rank.

    Raises:
        ValueError: If this rank is not a member of the group, or the mesh has several dimensions.
        TypeError: If `group` is none of these.
    """
    process_group = _resolve(group)
    if torch.compiler.is_compiling():
        _make_graph_depend_on(process_group)
    return process_group


def _resolve(group: Group) -> dist.ProcessGroup | None:
    if isinstance(group, dist.ProcessGroup):
        if group.rank() < 0:
            raise ValueError(_NOT_A_MEMBER)
        return group
    if group is None:
        if dist.is_available() and dist.is_initialized():
            return dist.group.WORLD
        return None
    if group is LONE_RANK:
        return None
    if isinstance(group, DeviceMesh):
        return _group_of_mesh(group)
    # What torch hands to ranks outside a new group is an int.
    if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(_NOT_A_MEMBER)
    raise TypeError(
        f"group is a {type(group).__name__}: expected a torch.distributed ProcessGroup, a 1-D "
        "DeviceMesh, ulysses_comm.LONE_RANK, or None for the default group."
    )


def rank_and_world_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return this rank's place in the group and the group's size; (0, 1) for a lone rank."""
    return (0, 1) if group is None else (group.rank(), group.size())


def _make_graph_depend_on(group: dist.ProcessGroup | None) -> None:
    """Let a compiled function be compiled anew for another group.

    torch 2.13 guards it on the type of a group alone, yet takes the group's rank, size and name for
    constants, so that a second group would silently be served by the first one's graph. Values
    that are read and used are guarded on: here the default group's identity, which changes when
    groups are made anew, and the name, which tells the groups of one process apart.
    """
    _ = dist.group.WORLD
    if group is not None and group.group_name == "":
        raise RuntimeError("group has no name in torch's registry, by which a graph could find it.")


_NOT_A_MEMBER = (
    "group: this rank is not a member of the group it passes. Call the exchange only on the ranks "
    "that were listed when the group was made, or pass the group that holds this rank."
)


def _group_of_mesh(mesh: DeviceMesh) -> dist.ProcessGroup:
    if mesh.ndim != 1:
        raise ValueError(
            f"group is a DeviceMesh of {mesh.ndim} dimensions {mesh.mesh_dim_names or ''}: "
            "expected one. Pass the dimension that shards the sequence, such as mesh['ulysses']."
        )
    if mesh.get_coordinate() is None:
        raise ValueError(_NOT_A_MEMBER)
    return mesh.get_group()
