"""What one call of `UlyssesAttention` is about, checked before anything is sent."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from ulysses_comm.group import Group, rank_and_world_size, resolve_group
from ulysses_comm.head_plan import HeadPlan, plan_heads
from ulysses_comm.layout import check_same_device, check_split_sizes, check_tensors
from ulysses_comm.token_layouts import TokenLayout, as_bshd


@dataclass(frozen=True)
class Joint:
    """Tokens that are attended to beside the sharded ones.

    Attributes:
        tensors: q, k and v in the caller's layout.
        place: Before or after the sharded tokens.
        split_sizes: Tokens each rank owns; None if every rank holds them all.
    """

    tensors: tuple[torch.Tensor, ...]
    place: Literal["front", "rear"]
    split_sizes: Sequence[int] | None


@dataclass(frozen=True)
class AttentionCall:
    """One checked call.

    Attributes:
        group: The ranks; None if this one attends alone.
        rank: This rank.
        layout: Of the tensors.
        batch: Sequences.
        split_sizes: Tokens each rank owns, in rank order, without joint ones.
        plan: The heads of each rank in each turn.
        joint: Joint tokens as (batch, tokens, heads, channels), or None.
        joint_split_sizes: Joint tokens each rank owns, if they are sharded.
        place: Where joint tokens go.
    """

    group: dist.ProcessGroup | None
    rank: int
    layout: TokenLayout
    batch: int
    split_sizes: tuple[int, ...]
    plan: HeadPlan
    joint: tuple[torch.Tensor, ...] | None
    joint_split_sizes: tuple[int, ...] | None
    place: Literal["front", "rear"]

    @property
    def world_size(self) -> int:
        """Ranks that share the sequence."""
        return len(self.split_sizes)

    @property
    def tokens(self) -> int:
        """Sharded tokens of this rank."""
        return self.split_sizes[self.rank]

    @property
    def seqlen(self) -> int:
        """Sharded tokens of all ranks."""
        return sum(self.split_sizes)

    @property
    def joint_tokens(self) -> int:
        """Joint tokens that this rank holds."""
        return 0 if self.joint is None else self.joint[0].shape[1]

    @property
    def total(self) -> int:
        """Tokens that are attended to."""
        if self.joint_split_sizes is not None:
            return self.seqlen + sum(self.joint_split_sizes)
        return self.seqlen + self.joint_tokens

    def alone(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """Return what a lone rank attends with: the tensors, head shards flattened."""
        is_shards = self.layout == "shd"
        return [t.flatten(1, 2) if is_shards and t.dim() == 4 else t for t in tensors]


def check_call(
    group: Group,
    layout: TokenLayout,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    split_sizes: Sequence[int] | None,
    joint: Joint | None,
    chunks: int,
) -> AttentionCall:
    """Check the arguments of one call.

    Raises:
        ValueError: For everything the caller can get wrong; names the argument, what was given and
            what was expected.
    """
    process_group = resolve_group(group)
    rank, world_size = rank_and_world_size(process_group)
    names = ("q", "k", "v")
    tensors = _check_qkv(names, (q, k, v), layout, world_size)
    batch, tokens, num_heads, num_kv_heads = tensors
    sizes = [tokens] * world_size
    if split_sizes is not None:
        sizes = check_split_sizes(split_sizes, world_size)
    if sizes[rank] != tokens:
        raise ValueError(
            f"q of shape {tuple(q.shape)} in layout {layout!r} has {tokens} tokens: expected "
            f"split_sizes[{rank}]={sizes[rank]}, the tokens of rank {rank}. Pass this rank's shard "
            "of the sequence."
        )
    joint_tensors, joint_sizes = None, None
    if joint is not None:
        joint_tensors, joint_sizes = _check_joint(joint, layout, (q, k, v), rank, world_size)
    return AttentionCall(
        group=process_group if world_size > 1 else None,
        rank=rank,
        layout=layout,
        batch=batch,
        split_sizes=tuple(sizes),
        plan=plan_heads(num_heads, num_kv_heads, world_size, chunks),
        joint=joint_tensors,
        joint_split_sizes=joint_sizes,
        place="front" if joint is None else joint.place,
    )


def _check_qkv(
    names: Sequence[str], tensors: Sequence[torch.Tensor], layout: TokenLayout, world_size: int
) -> tuple[int, int, int, int]:
    """Return (batch, tokens, query heads, key/value heads)."""
    for name, tensor in zip(names, tensors, strict=True):
        check_tensors([tensor], name=name)
        is_shards = layout == "shd" and tensor.dim() == 4
        if is_shards and tensor.shape[1] != world_size:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} in layout 'shd': expected (tokens, heads, "
                f"head_dim), or head shards (tokens, world_size={world_size}, heads per rank, "
                "head_dim). For a batch choose layout='bshd' or 'bhsd'."
            )
        if not is_shards and tensor.dim() != len(layout):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}: expected the {len(layout)} axes of "
                f"layout={layout!r} (b batch, s tokens, h heads, d channels of a head)."
            )
    check_same_device(tensors)
    (batch, tokens, num_heads, dim), key, value = (_shape_of(t, layout) for t in tensors)
    if key[:2] != (batch, tokens) or value[:2] != (batch, tokens):
        raise ValueError(
            f"{_shown(names, tensors)} in layout {layout!r}: expected as many sequences and tokens "
            "in each. Attention to another sequence, or with a cache of earlier tokens, is not "
            "split by it."
        )
    if key[2] != value[2] or dim != key[3] or batch < 1:
        raise ValueError(
            f"{_shown(names, tensors)} in layout {layout!r}: expected one sequence or more, as "
            f"many heads in {names[1]} as in {names[2]}, and as many channels in {names[0]} as in "
            f"{names[1]}."
        )
    # Plain ints also where a compiler traces sizes as symbols: the heads are a model's own.
    return batch, tokens, operator.index(num_heads), operator.index(key[2])


def _shown(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> str:
    shapes = [f"{name} {tuple(t.shape)}" for name, t in zip(names, tensors, strict=True)]
    return ", ".join(shapes)


def _shape_of(tensor: torch.Tensor, layout: TokenLayout) -> tuple[int, int, int, int]:
    if layout == "shd" and tensor.dim() == 4:
        tokens, ranks, heads, dim = tensor.shape
        return 1, tokens, ranks * heads, dim
    batch, tokens, heads, dim = as_bshd(tensor, layout).shape
    return batch, tokens, heads, dim


def _check_joint(
    joint: Joint,
    layout: TokenLayout,
    tensors: Sequence[torch.Tensor],
    rank: int,
    world_size: int,
) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...] | None]:
    if joint.place not in ("front", "rear"):
        raise ValueError(f"place={joint.place!r}: expected 'front' or 'rear'.")
    names = ("joint_q", "joint_k", "joint_v")
    for name, extra, tensor in zip(names, joint.tensors, tensors, strict=True):
        if extra.dim() != tensor.dim() or extra.dim() != len(layout):
            raise ValueError(
                f"{name} has shape {tuple(extra.shape)} beside {tuple(tensor.shape)}: expected the "
                f"{len(layout)} axes of layout={layout!r} for both."
            )
        batch, _, *rest = _shape_of(tensor, layout)
        joint_batch, _, *joint_rest = _shape_of(extra, layout)
        if (batch, rest) != (joint_batch, joint_rest) or extra.dtype != tensor.dtype:
            raise ValueError(
                f"{name} is {tuple(extra.shape)} {extra.dtype} beside {tuple(tensor.shape)} "
                f"{tensor.dtype} in layout {layout!r}: expected the same dtype and axes but for "
                "the number of tokens."
            )
    check_same_device([*tensors, *joint.tensors])
    _, tokens, _, _ = _check_qkv(names, joint.tensors, layout, world_size)
    seen = tuple(as_bshd(tensor, layout) for tensor in joint.tensors)
    if joint.split_sizes is None:
        return seen, None
    sizes = check_split_sizes(joint.split_sizes, world_size)
    if sizes[rank] != tokens:
        raise ValueError(
            f"joint_q of shape {tuple(joint.tensors[0].shape)} has {tokens} tokens: expected "
            f"joint_split_sizes[{rank}]={sizes[rank]}, the joint tokens of rank {rank}."
        )
    return seen, tuple(sizes)
