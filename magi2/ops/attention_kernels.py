"""Packed attention without sinks by the kernels of torch and of other packages.

Each function takes q (tokens, heads, head_dim), k and v (tokens, kv_heads, head_dim) of any strides
with adjacent channels, and yields what it attended in pieces: views of a kernel's result, with the
natural logarithm of each query's sum of exponentials. Inputs are read as they lie; a group of heads
that share a key/value head has it copied for kernels that want one for each.

Names of operators are looked up when they are needed: not every torch has them all.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from magi2.ops.attention import packed_attention_torch
from magi2.ops.packed_sequences import PackedSequences


class Attended(NamedTuple):
    """Attention of rows `start` to `end`: (rows, heads, head_dim), and (rows, heads) float32."""

    start: int
    end: int
    out: torch.Tensor
    lse: torch.Tensor


Kernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, PackedSequences, float], Iterator[Attended]
]
# Attends one sequence, (1, heads, tokens, head_dim) each, to its like and (1, heads, tokens, ...).
_OneSequence = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[Any, ...]]


def attend_plainly(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    packed: PackedSequences,
    softcap: float,
) -> Iterator[Attended]:
    """By `packed_attention_torch`, in one piece."""
    yield Attended(
        0, packed.num_tokens, *packed_attention_torch(q_THD, k_TGD, v_TGD, packed.ends, softcap)
    )


def attend_cudnn(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    packed: PackedSequences,
    softcap: float,
) -> Iterator[Attended]:
    """By cuDNN, a sequence at a time."""
    operator = torch.ops.aten._scaled_dot_product_cudnn_attention
    scale = q_THD.shape[2] ** -0.5

    def one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Any, ...]:
        result: tuple[Any, ...] = operator(q, k, v, None, True, 0.0, False, False, scale=scale)
        return result

    return _by_sequence(one, q_THD, k_TGD, v_TGD, packed, softcap)


def attend_cpu_flash(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    packed: PackedSequences,
    softcap: float,
) -> Iterator[Attended]:
    """By torch's blocked attention for CPUs, a sequence at a time."""
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    scale = q_THD.shape[2] ** -0.5

    def one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Any, ...]:
        result: tuple[Any, ...] = operator(q, k, v, 0.0, False, scale=scale)
        return result

    return _by_sequence(one, q_THD, k_TGD, v_TGD, packed, softcap)


def attend_musa(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    packed: PackedSequences,
    softcap: float,
) -> Iterator[Attended]:
    """By the operator behind torch_musa's scaled_dot_product_attention, a sequence at a time."""
    operator = musa_operator()
    assert operator is not None
    scale = q_THD.shape[2] ** -0.5

    def one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Any, ...]:
        result: tuple[Any, ...] = operator(q, k, v, None, 0.0, False, scale=scale)
        return result

    return _by_sequence(one, q_THD, k_TGD, v_TGD, packed, softcap)


def attend_flex(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    packed: PackedSequences,
    softcap: float,
) -> Iterator[Attended]:
    """By FlexAttention, compiled for any length, a sequence at a time; on a CPU as it is."""
    attend = flex_attention(q_THD.device.type)
    score_mod = _capped(softcap) if softcap > 0 else None

    def one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Any, ...]:
        result: tuple[Any, ...] = attend(q, k, v, score_mod, q.shape[3] ** -0.5)
        return result

    return _by_sequence(one, q_THD, k_TGD, v_TGD, packed, softcap)


def attend_flash(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    packed: PackedSequences,
    softcap: float,
) -> Iterator[Attended]:
    """By the FlashAttention in torch, all sequences in one call."""
    if packed.num_tokens:
        ends, longest = packed.ends_on(q_THD.device), packed.longest
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q_THD,
            k_TGD,
            v_TGD,
            ends,
            ends,
            longest,
            longest,
            0.0,
            False,
            False,
            scale=q_THD.shape[2] ** -0.5,
        )
        yield Attended(0, packed.num_tokens, out, _heads_last(lse, out))


def attend_varlen(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    packed: PackedSequences,
    softcap: float,
) -> Iterator[Attended]:
    """By torch's `varlen_attn`, all sequences in one call."""
    if packed.num_tokens:
        module = importlib.import_module("torch.nn.attention.varlen")
        ends, longest = packed.ends_on(q_THD.device), packed.longest
        # Older ones take fewer key heads as they are, newer ones want to be told.
        shared = {"enable_gqa": True} if takes_argument(module.varlen_attn, "enable_gqa") else {}
        out, lse = module.varlen_attn(
            q_THD,
            k_TGD,
            v_TGD,
            ends,
            ends,
            longest,
            longest,
            return_aux=module.AuxRequest(lse=True),
            scale=q_THD.shape[2] ** -0.5,
            **shared,
        )
        yield Attended(0, packed.num_tokens, out, _heads_last(lse, out))


def attend_flash_attn(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    packed: PackedSequences,
    softcap: float,
) -> Iterator[Attended]:
    """By the package flash-attn, all sequences in one call."""
    if packed.num_tokens:
        ends, longest = packed.ends_on(q_THD.device), packed.longest
        out, lse, *_ = importlib.import_module("flash_attn").flash_attn_varlen_func(
            q_THD,
            k_TGD,
            v_TGD,
            ends,
            ends,
            longest,
            longest,
            softmax_scale=q_THD.shape[2] ** -0.5,
            softcap=max(softcap, 0.0),
            return_attn_probs=True,
        )
        yield Attended(0, packed.num_tokens, out, _heads_last(lse, out))


def musa_operator() -> Callable[..., tuple[Any, ...]] | None:
    """torch_musa's fused attention that returns a log-sum-exp; None if this torch has none."""
    found: Callable[..., tuple[Any, ...]] | None = getattr(
        torch.ops.aten, "_scaled_dot_product_attention_flash_musa", None
    )
    return found


@functools.cache
def takes_argument(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has a parameter of this name."""
    return name in inspect.signature(function).parameters


@functools.cache
def flex_attention(kind: str) -> Callable[..., Any]:
    """FlexAttention, compiled once for each kind of device."""
    module = importlib.import_module("torch.nn.attention.flex_attention")

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score_mod: Any, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The attention and its log-sum-exp, for which 2.9 has another name."""
        if hasattr(module, "AuxRequest"):
            request = module.AuxRequest(lse=True)
            out, aux = module.flex_attention(q, k, v, score_mod, scale=scale, return_aux=request)
            return out, aux.lse
        out, lse = module.flex_attention(q, k, v, score_mod, scale=scale, return_lse=True)
        return out, lse

    # A CPU's compiled form has no log-sum-exp; there it serves tests.
    return attend if kind == "cpu" else torch.compile(attend, dynamic=True)


@functools.cache
def _capped(softcap: float) -> Callable[..., torch.Tensor]:
    """One function for each cap: a new one would be compiled anew."""

    def cap(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


def _by_sequence(
    one: _OneSequence,
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    packed: PackedSequences,
    softcap: float,
) -> Iterator[Attended]:
    for start, end in packed.spans:
        rows = q_THD[start:end]
        if end - start == 1:
            # One key has all the weight, which cuDNN does not take.
            own = (rows, k_TGD[start:end], v_TGD[start:end])
            out, lse = packed_attention_torch(*own, (0, 1), softcap)
            yield Attended(start, end, out, lse)
            continue
        keys, values = (_for_query_heads(x[start:end], rows.shape[1]) for x in (k_TGD, v_TGD))
        out, lse, *_ = one(*(x.transpose(0, 1).unsqueeze(0) for x in (rows, keys, values)))
        out = out.squeeze(0).transpose(0, 1)
        yield Attended(start, end, out, lse.reshape(rows.shape[1], end - start).t())


def _for_query_heads(x_TGD: torch.Tensor, num_heads: int) -> torch.Tensor:
    shared = num_heads // x_TGD.shape[1]
    return x_TGD if shared == 1 else x_TGD.repeat_interleave(shared, dim=1)


def _heads_last(lse: torch.Tensor, out_THD: torch.Tensor) -> torch.Tensor:
    """(tokens, heads) of FlashAttention's (heads, tokens).

    Raises:
        RuntimeError: If it is padded to the longest sequence, as old versions have it.
    """
    tokens, heads, _ = out_THD.shape
    if lse.shape != (heads, tokens):
        raise RuntimeError(
            f"FlashAttention gave a log-sum-exp of shape {list(lse.shape)}: expected "
            f"({heads}, {tokens}), heads and tokens, as it has been since 2.6. Update it, or use "
            "another attention_backend."
        )
    return lse.t()
