"""Ulysses sequence parallelism around any attention function.

    own tokens, all heads --exchange--> all tokens, own heads --attention, exchange--> own, all

docs/attention.md says what fits in and what is copied.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch

from ulysses_comm.agreement import Validate
from ulysses_comm.attention_call import AttentionCall, Joint, check_call
from ulysses_comm.group import Group
from ulysses_comm.layout import promoted_dtype, whole_number
from ulysses_comm.per_head import PER_HEAD_ARGUMENTS, HeadIndex, PerHead, Rule
from ulysses_comm.token_layouts import TokenLayout, as_bshd, check_layout, from_bshd
from ulysses_comm.turns import Outcome, Setting, attend_in_turns
from ulysses_comm.workspace import Workspace

LseLayout = Literal["sh", "hs", "bsh", "bhs"]
"""Order of the axes of a log-sum-exp: b batch, s tokens, h heads."""

AttentionResult: TypeAlias = "torch.Tensor | tuple[torch.Tensor, torch.Tensor]"
"""The output, or the output and its log-sum-exp; what the wrapped attention returns."""


class UlyssesAttention(torch.nn.Module):
    """Attention over a sequence that the ranks of a group share.

    Wraps any `attention(q, k, v, **kwargs) -> out` that takes and returns one layout. The wrapped
    one sees the whole sequence and some of the heads; the caller sees its own tokens and all heads.
    """

    def __init__(
        self,
        attention: Callable[..., Any],
        *,
        group: Group,
        layout: TokenLayout = "shd",
        lse_layout: LseLayout | None = None,
        per_head: Mapping[str, Rule | None] | None = None,
        keep_dtypes: bool = False,
        chunks: int = 1,
        workspace: Workspace | None = None,
        validate: Validate = False,
    ) -> None:
        """Wrap an attention function or module.

        Args:
            attention: What attends on one rank. Gets q, k and v in `layout` with all tokens, fewer
                heads and any strides (the last is 1), and returns the output in `layout`, channels
                as v's, dtype as q's. A module's parameters become this module's.
            group: The ranks that share the sequence: a process group, a 1-D device mesh, None for
                the default group, or `LONE_RANK`.
            layout: Order of the axes of q, k, v and the output.
            lse_layout: Order of the axes of the log-sum-exp, if `attention` returns (output, lse)
                with lse in float32; the wrapper then returns both. None: it returns the output.
            per_head: Which keyword arguments have a value for each head, and how they are cut;
                added to `PER_HEAD_ARGUMENTS`, None takes a name out.
            keep_dtypes: Attend with each of q, k and v in its own dtype instead of their promoted
                one.
            chunks: Turns in which the heads are exchanged and attended with: while one turn
                attends, the next one's heads travel. Never more than a rank has heads. Same bits.
            workspace: Where to take buffers from; None allocates them.
            validate: Let the ranks compare what they mean to exchange before anything is sent.

        Raises:
            ValueError: If layout, lse_layout, chunks or a rule is none of ours, or attention cannot
                be called.
        """
        super().__init__()
        check_layout(layout)
        if lse_layout not in (None, "sh", "hs", "bsh", "bhs"):
            raise ValueError(
                f"lse_layout={lse_layout!r}: expected 'sh', 'hs', 'bsh', 'bhs', or None if the "
                "attention returns its output alone."
            )
        chunks = whole_number("chunks", chunks)
        if chunks < 1:
            raise ValueError(f"chunks={chunks!r}: expected one turn or more.")
        if not callable(attention):
            raise ValueError(
                f"attention is a {type(attention).__name__}: expected a function or a module."
            )
        self.attention = attention
        self.group = group
        self.layout: TokenLayout = layout
        self.lse_layout = lse_layout
        rules = {**PER_HEAD_ARGUMENTS, **_checked_rules(per_head)}
        self.per_head = {name: rule for name, rule in rules.items() if rule is not None}
        self.keep_dtypes = keep_dtypes
        self.chunks = chunks
        self.workspace = workspace
        self.validate = validate

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        split_sizes: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> AttentionResult:
        """Attend from this rank's tokens to the whole sequence.

        Args:
            q: This rank's tokens of all query heads, in `layout`. In layout "shd" also head shards
                (tokens, world_size, heads per rank, head_dim), sent without a copy if q, k and v
                tile one send buffer.
            k: As q, with as many heads or a divisor of them.
            v: As k; head_dim may differ.
            split_sizes: Tokens each rank owns, in rank order; None if all own as many as this one.
            kwargs: For the wrapped attention: what is declared `per_head` is cut to the rank's
                heads, all else passes as it is. Masks and cu_seqlens are those of the whole
                sequence.

        Returns:
            The output for this rank's tokens and all query heads in `layout`, a tensor of its own;
            with `lse_layout` also the log-sum-exp.

        Raises:
            ValueError: For bad input, on the rank at fault, before anything is sent; or if the
                wrapped attention returns something else than it should.
            RankDisagreementError: If validate is on and the ranks disagree or one is missing.

        One all-to-all in, one out, for each turn. Differentiable if the wrapped attention is.
        """
        call = check_call(self.group, self.layout, q, k, v, split_sizes, None, self.chunks)
        if call.group is None:
            return self._checked_locally(self.attention(*self._alone(call, (q, k, v)), **kwargs))
        outcome = self._run(call, (q, k, v), kwargs)
        return self._result(outcome.output, outcome.lse)

    def joint(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        joint_q: torch.Tensor,
        joint_k: torch.Tensor,
        joint_v: torch.Tensor,
        *,
        place: Literal["front", "rear"] = "front",
        split_sizes: Sequence[int] | None = None,
        joint_split_sizes: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> tuple[AttentionResult, AttentionResult]:
        """Attend over sharded tokens and joint ones, such as an image's and its prompt's.

        Joint tokens appear once, before or after all the others.

        Args:
            q: As in `forward`, not as head shards; so are k and v.
            k: See q.
            v: See q.
            joint_q: Tokens that every rank holds whole, the same on all, in `layout`.
            joint_k: See joint_q.
            joint_v: See joint_q.
            place: Whether the joint tokens come before ("front") or after ("rear") the others, for
                the wrapped attention and its masks.
            split_sizes: As in `forward`, without the joint tokens.
            joint_split_sizes: If the joint tokens are sharded too: how many each rank owns. None:
                every rank holds them all.
            kwargs: As in `forward`.

        Returns:
            What `forward` returns, for the sharded tokens and for the joint ones; the latter whole
            on every rank, or this rank's share with `joint_split_sizes`.

        Raises:
            ValueError: As `forward`.

        One all-to-all in, one out, for each turn. Joint tokens cost a copy in front of the
        attention and one behind it. The gradient of a joint tensor is what this rank's heads
        contribute: like parameters' gradients, the ranks' have to be summed.
        """
        tensors = (joint_q, joint_k, joint_v)
        joint = Joint(tensors, place, joint_split_sizes)
        call = check_call(self.group, self.layout, q, k, v, split_sizes, joint, self.chunks)
        if call.group is None:
            return self._joint_alone(call, (q, k, v), tensors, place, kwargs)
        outcome = self._run(call, (q, k, v), kwargs)
        assert outcome.joint_output is not None, "there are joint tokens"
        return (
            self._result(outcome.output, outcome.lse),
            self._result(outcome.joint_output, outcome.joint_lse),
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> UlyssesAttention:
        """Copy the module and what it wraps; the copy works with the same ranks and buffers."""
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        memo.update({id(kept): kept for kept in (self.group, self.workspace)})
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    def extra_repr(self) -> str:
        """Say what is not a submodule."""
        return f"layout={self.layout!r}, chunks={self.chunks}, keep_dtypes={self.keep_dtypes}"

    def _alone(
        self, call: AttentionCall, tensors: tuple[torch.Tensor, ...]
    ) -> Sequence[torch.Tensor]:
        """Return what a lone rank attends with, in the dtype that several would."""
        own = call.alone(*tensors)
        if self.keep_dtypes:
            return own
        common = promoted_dtype(own)
        return [tensor.to(common) for tensor in own]

    def _run(
        self, call: AttentionCall, tensors: tuple[torch.Tensor, ...], kwargs: dict[str, Any]
    ) -> Outcome:
        def attend(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **cut: Any
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            parts = (from_bshd(tensor, self.layout) for tensor in (q, k, v))
            output, lse = self._split_result(self.attention(*parts, **cut))
            self._check_axes(output)
            return as_bshd(output, self.layout), None if lse is None else self._lse_as_bshd(lse)

        setting = Setting(
            call=call,
            attend=attend,
            arguments=kwargs,
            rules=self.per_head,
            with_lse=self.lse_layout is not None,
            workspace=self.workspace,
            validate=self.validate,
        )
        return attend_in_turns(setting, tensors, keep_dtypes=self.keep_dtypes)

    def _joint_alone(
        self,
        call: AttentionCall,
        tensors: tuple[torch.Tensor, ...],
        joint: tuple[torch.Tensor, ...],
        place: Literal["front", "rear"],
        kwargs: dict[str, Any],
    ) -> tuple[AttentionResult, AttentionResult]:
        axis = self.layout.index("s")
        pairs = zip(self._alone(call, tensors), joint, strict=True)
        whole = [
            torch.cat([extra, own] if place == "front" else [own, extra], dim=axis)
            for own, extra in ((own, extra.to(own.dtype)) for own, extra in pairs)
        ]
        output, lse = self._split_result(self.attention(*whole, **kwargs))
        sizes = [call.joint_tokens, call.tokens]
        if place == "rear":
            sizes.reverse()

        def cut(tensor: torch.Tensor, axis: int) -> list[torch.Tensor]:
            parts = list(tensor.split(sizes, dim=axis))
            return parts[::-1] if place == "front" else parts

        own, extra = cut(output, axis)
        if lse is None or self.lse_layout is None:
            return own, extra
        own_lse, extra_lse = cut(lse, self.lse_layout.index("s"))
        return (own, own_lse), (extra, extra_lse)

    def _checked_locally(self, result: Any) -> AttentionResult:
        output, lse = self._split_result(result)
        return output if lse is None else (output, lse)

    def _split_result(self, result: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.lse_layout is None and isinstance(result, torch.Tensor):
            return result, None
        if self.lse_layout is not None and isinstance(result, (tuple, list)) and len(result) >= 2:
            return result[0], result[1]
        expected = "a tensor" if self.lse_layout is None else "(output, lse)"
        raise ValueError(
            f"The attention returned a {type(result).__name__}: expected {expected} by "
            f"lse_layout={self.lse_layout!r}. Wrap it in a function that returns that, or set "
            "lse_layout to the axes of the log-sum-exp that it returns."
        )

    def _check_axes(self, output: torch.Tensor) -> None:
        if output.dim() != len(self.layout):
            raise ValueError(
                f"The attention returned a tensor of shape {tuple(output.shape)}: expected the "
                f"{len(self.layout)} axes of layout={self.layout!r}, which it takes. Leave heads "
                "and channels apart."
            )

    def _lse_as_bshd(self, lse: torch.Tensor) -> torch.Tensor:
        layout = self.lse_layout
        assert layout is not None, "asked for by the caller"
        if lse.dim() != len(layout):
            raise ValueError(
                f"The attention returned a log-sum-exp of shape {tuple(lse.shape)}: expected the "
                f"{len(layout)} axes of lse_layout={layout!r}."
            )
        if layout in ("hs", "bhs"):
            lse = lse.transpose(-1, -2)
        return (lse if lse.dim() == 3 else lse.unsqueeze(0)).unsqueeze(-1)

    def _result(self, output: torch.Tensor, lse: torch.Tensor | None) -> AttentionResult:
        result = from_bshd(output, self.layout)
        if lse is None or self.lse_layout is None:
            return result
        lse = lse.squeeze(-1)
        if len(self.lse_layout) == 2:
            lse = lse.squeeze(0)
        return result, lse.transpose(-1, -2) if self.lse_layout in ("hs", "bhs") else lse


def _checked_rules(per_head: Mapping[str, Rule | None] | None) -> Mapping[str, Rule | None]:
    if per_head is None:
        return {}
    if not isinstance(per_head, Mapping):
        raise ValueError(
            f"per_head is a {type(per_head).__name__}: expected a mapping of argument names, such "
            "as {'bias': PerHead(-3)}."
        )
    for name, rule in per_head.items():
        if not (rule is None or isinstance(rule, (PerHead, HeadIndex))):
            raise ValueError(
                f"per_head[{name!r}] is {rule!r}: expected PerHead(axis), HeadIndex(position), or "
                "None to pass the argument as it is."
            )
    return per_head
