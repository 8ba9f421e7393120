"""Attention inside packed sequences, with learned sinks.

Letters: T tokens, H query heads, G key/value heads, D channels of a head, K sinks of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch


def packed_attention_torch(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    v_TGD: torch.Tensor,
    cu_seqlens: Sequence[int],
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention inside each sequence, without a mask, nothing across sequences.

    Args:
        q_THD: (tokens, heads, head_dim).
        k_TGD: (tokens, kv_heads, head_dim); query head h reads `h * kv_heads // heads`.
        v_TGD: As k.
        cu_seqlens: Ends of the sequences, from 0 to tokens; empty sequences are legal.
        softcap: Scores become `softcap * tanh(score / softcap)`; zero or less for none.

    Returns:
        The attention, q's shape and dtype, computed in float32 and rounded once; and the natural
        logarithm of each query's sum of exponentials, (tokens, heads) float32.

    Works off head_dim queries at a time: their scores then take as much memory as the keys, so
    memory grows with the tokens and not with their square, and a block (hence its rounding) does
    not depend on how many heads this rank has.
    """
    outs, lses = [q_THD[:0]], [q_THD.new_empty(0, q_THD.shape[1], dtype=torch.float32)]
    for start, end in pairwise(cu_seqlens):
        if start == end:
            continue
        keys, values = (_for_query_heads(x[start:end], q_THD.shape[1]) for x in (k_TGD, v_TGD))
        for queries in q_THD[start:end].split(q_THD.shape[2]):
            out, lse = _attend(queries, keys, values, softcap)
            outs.append(out)
            lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def apply_sinks_torch(
    out_THD: torch.Tensor, lse_TH: torch.Tensor, sinks_KH: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Let sink logits without values take their part of the softmax.

    Args:
        out_THD: Attention without sinks.
        lse_TH: Its log-sum-exp, float32.
        sinks_KH: (sinks, heads) float32 logits; neither scaled nor capped.

    Returns:
        The attention with sinks, in out's dtype (the weight stays float32 and the product is
        rounded), and the log-sum-exp with sinks.
    """
    total = sink_totals_torch(sinks_KH)
    weight = sink_weights_torch(lse_TH, total)
    out = (out_THD.float() * weight.unsqueeze(-1)).to(out_THD.dtype)
    return out, torch.logaddexp(lse_TH, total)


def sink_totals_torch(sinks_KH: torch.Tensor) -> torch.Tensor:
    """Log-sum-exp of each head's sinks, (heads,) float32; of a single sink the sink, as it lies."""
    return sinks_KH[0] if sinks_KH.shape[0] == 1 else sinks_KH.logsumexp(dim=0)


def sink_weights_torch(lse_TH: torch.Tensor, sink_total_H: torch.Tensor) -> torch.Tensor:
    """What the sinks leave of the softmax, (tokens, heads) float32: 1 without sinks.

    0 where the difference of the log-sum-exps is no number: for an lse that is not finite, whatever
    the sinks are, and for sinks that are NaN.
    """
    difference = lse_TH - torch.logaddexp(lse_TH, sink_total_H)
    return torch.exp(difference).nan_to_num(nan=0.0)


def _for_query_heads(x_TGD: torch.Tensor, num_heads: int) -> torch.Tensor:
    """(heads, tokens, head_dim) float32: for each query head the key/value head that it reads."""
    x = x_TGD.float().transpose(0, 1)
    return x.repeat_interleave(num_heads // x.shape[0], dim=0)


def _attend(
    q_THD: torch.Tensor, k_HTD: torch.Tensor, v_HTD: torch.Tensor, softcap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = q_THD.shape[-1] ** -0.5
    scores = q_THD.float().transpose(0, 1) @ k_HTD.transpose(1, 2) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    out = torch.softmax(scores, dim=-1) @ v_HTD
    return out.transpose(0, 1).to(q_THD.dtype), torch.logsumexp(scores, dim=-1).transpose(0, 1)
