"""Attention functions in every layout, inputs, and what one process makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from ulysses_comm.token_layouts import as_bshd, from_bshd

SPLITS = {
    1: (9,),
    2: (5, 4),
    3: (4, 0, 5),
    4: (3, 2, 0, 4),
    5: (1, 2, 3, 0, 3),
    8: (2, 1, 1, 1, 1, 0, 2, 1),
}

# Query and key/value heads; the worlds above make some divide, some not, and leave some without.
HEADS = {
    "plain": (8, 8),
    "uneven": (7, 7),
    "grouped": (8, 2),
    "grouped, straddling": (6, 3),
    "groups that no rank holds whole": (6, 2),
    "multi-query": (6, 1),
    "fewer heads than ranks": (2, 1),
}


def sdpa_of(layout: str) -> Callable[..., torch.Tensor]:
    """Return torch's attention for a layout; it handles grouped queries."""

    def attention(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        heads_first = [as_bshd(t, layout).transpose(1, 2) for t in (q, k, v)]
        output = scaled_dot_product_attention(
            *heads_first, attn_mask=attn_mask, enable_gqa=True, **kwargs
        )
        return from_bshd(output.transpose(1, 2), layout)

    return attention


def attention_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend in layout bshd, and return the log-sum-exp as (batch, heads, tokens) too."""
    repeat = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(repeat, dim=2) for t in (k, v))
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = torch.einsum("bqhd,bkhd->bhqk", q.to(wide), k.to(wide)) / q.shape[-1] ** 0.5
    output = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v.to(wide)).to(q.dtype)
    return output, scores.logsumexp(-1)


def integer_mix(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Stand in for attention (layout bshd): mixes all tokens head by head, in exact integers."""
    repeat = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(repeat, dim=2) for t in (k, v))
    return q.cumsum(1) * 3 + k.flip(1).cumsum(1) * 5 + v * v.sum(1, keepdim=True)


def inputs(
    layout: str,
    heads: tuple[int, int],
    *,
    length: int = 9,
    batch: int = 2,
    head_dims: tuple[int, int] = (8, 8),
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> list[torch.Tensor]:
    """Return the whole q, k and v in a layout."""
    generator = torch.Generator().manual_seed(seed)
    batch = 1 if layout == "shd" else batch
    tensors = []
    for number, dim in (
        (heads[0], head_dims[0]),
        (heads[1], head_dims[0]),
        (heads[1], head_dims[1]),
    ):
        whole = torch.randn((batch, length, number, dim), generator=generator, dtype=torch.float64)
        tensors.append(from_bshd(whole.to(dtype), layout))
    return tensors


def token_axis(layout: str) -> int:
    return layout.index("s")


def shard(tensor: torch.Tensor, splits: tuple[int, ...], rank: int, layout: str) -> torch.Tensor:
    return tensor.split(splits, dim=token_axis(layout))[rank]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare sums in float64 that differ by their order only."""
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)
