"""Exchange, attend, exchange back: once, or in turns that overlap.

All tensors here are (batch, tokens, heads, channels).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ulysses_comm.agreement import Validate
from ulysses_comm.attention_call import AttentionCall
from ulysses_comm.head_plan import LocalHeads, Turn, select_heads
from ulysses_comm.launch import launch_scatter_heads, launch_scatter_seqlen_each
from ulysses_comm.layout import promoted_dtype
from ulysses_comm.pending import Pending
from ulysses_comm.per_head import Rule, slice_arguments
from ulysses_comm.token_layouts import as_bshd, join_batch, split_batch
from ulysses_comm.workspace import Workspace

Attend = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
Received = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Setting:
    """How a call is carried out.

    Attributes:
        call: The call.
        attend: Attends on this rank: (q, k, v, **arguments) to (output, lse or None).
        arguments: What else `attend` gets, for all heads.
        rules: How those are cut.
        with_lse: Whether there is a log-sum-exp.
        workspace: Where buffers come from.
        validate: Whether ranks compare what they are about to exchange.
    """

    call: AttentionCall
    attend: Attend
    arguments: Mapping[str, Any]
    rules: Mapping[str, Rule]
    with_lse: bool
    workspace: Workspace | None
    validate: Validate

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns of the call."""
        return self.call.plan.turns

    @property
    def overlaps(self) -> bool:
        """Whether exchanges run while something else does."""
        return len(self.turns) > 1

    @property
    def carried_sizes(self) -> list[int]:
        """Tokens that each rank sends in and gets back, joint ones included if they travel."""
        joint = self.call.joint_split_sizes or (0,) * self.call.world_size
        return [own + extra for own, extra in zip(self.call.split_sizes, joint, strict=True)]


@dataclass(frozen=True)
class Outcome:
    """What attention gives this rank.

    Attributes:
        output: For its own tokens.
        joint_output: For the joint tokens that it holds; None if there are none.
        lse: The log-sum-exp of `output`, one channel; None if there is none.
        joint_lse: That of `joint_output`.
    """

    output: torch.Tensor
    joint_output: torch.Tensor | None
    lse: torch.Tensor | None
    joint_lse: torch.Tensor | None


def attend_in_turns(
    setting: Setting, tensors: tuple[torch.Tensor, ...], *, keep_dtypes: bool
) -> Outcome:
    """Attend with q, k and v in the call's layout, each with this rank's tokens of all heads.

    While a turn attends, the next turn's heads are on their way in and the previous turn's on their
    way out.
    """
    call = setting.call
    starts = _starters(setting, tensors, keep_dtypes)
    pending = starts[0]()
    first: Received | None = None
    sent: list[Pending[list[torch.Tensor]]] = []
    for number, turn in enumerate(setting.turns):
        current = pending
        if number + 1 < len(starts):
            pending = starts[number + 1]()
        received = _receive(current.wait(), turn, call.batch, first)
        first = first or received
        sent.append(_send_back(setting, turn, *_attend(setting, turn, received)))
    results = [handle.wait() for handle in sent]
    output, joint_output = _cut_joint(call, _assemble(setting, [p[: call.batch] for p in results]))
    if not setting.with_lse:
        return Outcome(output, joint_output, None, None)
    lse, joint_lse = _cut_joint(call, _assemble(setting, [p[call.batch :] for p in results]))
    return Outcome(output, joint_output, lse, joint_lse)


def _starters(
    setting: Setting, tensors: tuple[torch.Tensor, ...], keep_dtypes: bool
) -> list[Callable[[], Pending[list[torch.Tensor]]]]:
    """Return, for each turn, what starts its exchange of q, k and v."""
    call, plan = setting.call, setting.call.plan
    keep = keep_dtypes or tensors[0].shape[-1] != tensors[2].shape[-1]
    if not keep_dtypes and (keep or setting.overlaps):
        # Where the exchange keeps dtypes, or carries q alone, it does not promote by itself.
        common = promoted_dtype(tensors)
        tensors = tuple(tensor.to(common) for tensor in tensors)
    with_keys = [turn.key_value for turn in plan.turns if turn.key_value is not None]
    q, k, v = (_sequences(call, index, tensor) for index, tensor in enumerate(tensors))
    q_turns = [select_heads(part, [t.query for t in plan.turns], plan.query) for part in q]
    kv_turns = [select_heads(part, with_keys, plan.key_value) for part in (*k, *v)]

    def starter(number: int, turn: Turn) -> Callable[[], Pending[list[torch.Tensor]]]:
        inputs = [cut[number] for cut in q_turns]
        splits = [turn.query.split] * len(inputs)
        if turn.key_value is not None:
            inputs += [cut[number] for cut in kv_turns]
            splits += [turn.key_value.split] * len(kv_turns)
        return lambda: launch_scatter_heads(
            inputs,
            setting.carried_sizes,
            call.group,
            head_splits=splits,
            keep_dtypes=keep,
            validate=setting.validate,
            workspace=setting.workspace,
            out=None,
            async_op=setting.overlaps,
        )

    return [starter(number, turn) for number, turn in enumerate(plan.turns)]


def _sequences(call: AttentionCall, index: int, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return each sequence of q, k or v as the exchange takes it, sharded joint tokens behind."""
    if call.layout == "shd" and tensor.dim() == 4:
        return [tensor]
    seen = as_bshd(tensor, call.layout)
    if call.joint is not None and call.joint_split_sizes is not None:
        seen = torch.cat([seen, call.joint[index].to(seen.dtype)], dim=1)
    return split_batch(seen)


def _receive(
    results: list[torch.Tensor], turn: Turn, batch: int, first: Received | None
) -> Received:
    """Join the batch; keys and values may have come with the first turn."""
    parts = [results[start : start + batch] for start in range(0, len(results), batch)]
    if turn.key_value is None:
        assert first is not None, "the first turn brings keys and values"
        return join_batch(parts[0]), first[1], first[2]
    q, k, v = (join_batch(part) for part in parts)
    return q, k, v


def _attend(
    setting: Setting, turn: Turn, received: Received
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend with this rank's heads of one turn; checks what comes out."""
    call = setting.call
    local = turn.local[call.rank]
    q, k, v = received
    if local.num_query == 0:
        return _nothing(setting, q, v)
    start, stop = local.key_value
    k, v = (t.narrow(2, local.key_value_offset, stop - start) for t in (k, v))
    if local.index is not None:
        index = torch.tensor(local.index, device=k.device)
        k, v = k.index_select(2, index), v.index_select(2, index)
    if call.joint is not None:
        q, k, v = (
            _with_joint(call, tensor, joint, local, is_query=number == 0)
            for number, (tensor, joint) in enumerate(zip((q, k, v), call.joint, strict=True))
        )
    cut = slice_arguments(setting.arguments, setting.rules, call.plan, local)
    output, lse = setting.attend(q, k, v, **cut)
    _check_output(setting, turn, q, v, output, lse)
    return output, lse


def _nothing(
    setting: Setting, q: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the output of no heads, tied to what was received: backward has to pass here too."""
    call = setting.call
    tie = q.sum()
    output = q.new_zeros((call.batch, call.total, 0, v.shape[-1])) + tie
    if not setting.with_lse:
        return output, None
    lse = q.new_zeros((call.batch, call.total, 0, 1), dtype=_lse_dtype(q))
    return output, lse + tie.to(lse.dtype)


def _lse_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _with_joint(
    call: AttentionCall,
    tensor: torch.Tensor,
    joint: torch.Tensor,
    local: LocalHeads,
    *,
    is_query: bool,
) -> torch.Tensor:
    """Put the joint tokens before or after all others."""
    if call.joint_split_sizes is not None:
        pieces = tensor.split(
            [
                size
                for pair in zip(call.split_sizes, call.joint_split_sizes, strict=True)
                for size in pair
            ],
            dim=1,
        )
        own, extra = pieces[::2], pieces[1::2]
        return torch.cat([*extra, *own] if call.place == "front" else [*own, *extra], dim=1)
    start, stop = local.query if is_query else local.key_value
    extra_heads = joint.narrow(2, start, stop - start).to(tensor.dtype)
    if not is_query and local.index is not None:
        extra_heads = extra_heads.index_select(2, torch.tensor(local.index, device=joint.device))
    return torch.cat(
        [extra_heads, tensor] if call.place == "front" else [tensor, extra_heads], dim=1
    )


def _check_output(
    setting: Setting,
    turn: Turn,
    q: torch.Tensor,
    v: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """Check what the wrapped attention returned, before it is sent.

    Raises:
        ValueError: If it has another shape or dtype than it should.
    """
    layout = setting.call.layout
    if output.dim() != 4 or output.shape[:3] != q.shape[:3]:
        raise ValueError(
            f"The attention returned a tensor that has (batch, tokens, heads, channels) = "
            f"{tuple(output.shape)} in layout {layout!r}: expected {tuple(q.shape[:3])} first, as "
            "its q. Return the layout that it takes."
        )
    if 0 in turn.query.split.counts and (
        output.dtype != q.dtype or output.shape[-1] != v.shape[-1]
    ):
        # Ranks without a head have to know what the others send them.
        raise ValueError(
            f"The attention returned {output.dtype} with {output.shape[-1]} channels: expected "
            f"{q.dtype} as q and {v.shape[-1]} channels as v, since some ranks have no head and "
            "assume that. Convert its output, or use a group with no more ranks than heads."
        )
    if lse is not None and (lse.shape[:3] != q.shape[:3] or lse.dtype != _lse_dtype(q)):
        raise ValueError(
            f"The attention returned a log-sum-exp that has (batch, tokens, heads) = "
            f"{tuple(lse.shape[:3])} of {lse.dtype}: expected {tuple(q.shape[:3])} of "
            f"{_lse_dtype(q)}. Set lse_layout to the order of its axes."
        )


def _send_back(
    setting: Setting, turn: Turn, output: torch.Tensor, lse: torch.Tensor | None
) -> Pending[list[torch.Tensor]]:
    """Start the exchange of an output, and of its log-sum-exp in the same collective."""
    call = setting.call
    sizes = [size + _joint_share(call, rank) for rank, size in enumerate(call.split_sizes)]
    tensors = [_for_each_rank(call, t) for t in (output, lse) if t is not None]
    parts = [part for tensor in tensors for part in split_batch(tensor)]
    results = None
    if call.batch > 1 and not setting.overlaps and not torch.compiler.is_compiling():
        # One buffer for the batch, so that its sequences are joined where they lie.
        shape = (call.batch, sizes[call.rank], call.plan.num_heads)
        places = [_empty(setting.workspace, (*shape, t.shape[-1]), t) for t in tensors]
        results = [place for buffer in places for place in buffer.unbind(0)]
    return launch_scatter_seqlen_each(
        parts,
        sizes,
        call.group,
        head_splits=[turn.query.split] * len(parts),
        keep_dtypes=setting.with_lse,
        as_shards=setting.overlaps and call.plan.is_even,
        validate=setting.validate,
        workspace=setting.workspace,
        out=None,
        async_op=setting.overlaps,
        results=results,
    )


def _empty(workspace: Workspace | None, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    if workspace is None:
        return torch.empty(tuple(shape), dtype=like.dtype, device=like.device)
    return workspace.take(shape, like.dtype, like.device)


def _joint_share(call: AttentionCall, rank: int) -> int:
    """Joint tokens that a rank gets the output of."""
    return call.joint_tokens if call.joint_split_sizes is None else call.joint_split_sizes[rank]


def _for_each_rank(call: AttentionCall, tensor: torch.Tensor) -> torch.Tensor:
    """Put the joint tokens that a rank wants behind its own."""
    if call.joint is None:
        return tensor
    num_joint = call.total - call.seqlen
    if call.place == "front":
        joint, own = tensor.split([num_joint, call.seqlen], dim=1)
    else:
        own, joint = tensor.split([call.seqlen, num_joint], dim=1)
    owns = own.split(list(call.split_sizes), dim=1)
    if call.joint_split_sizes is None:
        joints: Sequence[torch.Tensor] = [joint] * call.world_size
    else:
        joints = joint.split(list(call.joint_split_sizes), dim=1)
    return torch.cat([piece for pair in zip(owns, joints, strict=True) for piece in pair], dim=1)


def _assemble(setting: Setting, turns: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """Put the heads of all turns together: (batch, tokens, num_heads, channels)."""
    parts = [join_batch(of_turn) for of_turn in turns]
    if not setting.overlaps:
        return parts[0]
    plan = setting.call.plan
    if plan.is_even:
        # (batch, tokens, ranks, heads of the turn, channels) each
        return torch.cat(parts, dim=3).flatten(2, 3)
    pieces = [
        part[:, :, slice(*turn.query.split.ranges[rank])]
        for rank in range(plan.query.world_size)
        for part, turn in zip(parts, plan.turns, strict=True)
    ]
    return torch.cat(pieces, dim=2)


def _cut_joint(
    call: AttentionCall, tensor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if call.joint is None:
        return tensor, None
    own, joint = tensor.split([call.tokens, _joint_share(call, call.rank)], dim=1)
    return own, joint
