"""Ranks that do not mean the same exchange: what they do, and what an error must say of it.

Used on the simulator and on gloo alike. Three ranks; rank 1 is the odd one out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias

import torch

from ulysses_comm import (
    scatter_heads_gather_seqlen,
    scatter_seqlen_gather_head_shards,
    scatter_seqlen_gather_heads,
)

WORLD, ODD = 3, 1
SPLITS = [4, 6, 2]
HEADS, HEAD_DIM = 2, 8

Validate: TypeAlias = "bool | timedelta"


def head_scatter(
    group: Any,
    validate: Validate,
    *,
    splits: list[int] = SPLITS,
    heads: int = HEADS,
    head_dim: int = HEAD_DIM,
    dtype: torch.dtype = torch.float32,
    count: int = 2,
) -> list[torch.Tensor]:
    shape = (splits[group.rank()], WORLD * heads, head_dim)
    tensors = [torch.ones(shape, dtype=dtype) for _ in range(count)]
    return scatter_heads_gather_seqlen(tensors, splits, group, validate=validate)


def output_exchange(
    group: Any,
    validate: Validate,
    *,
    splits: list[int] = SPLITS,
    heads: int = HEADS,
    head_dim: int = HEAD_DIM,
    dtype: torch.dtype = torch.float32,
    exchange: Callable[..., torch.Tensor] = scatter_seqlen_gather_heads,
) -> torch.Tensor:
    tensor = torch.ones(sum(splits), heads, head_dim, dtype=dtype)
    return exchange(tensor, splits, group, validate=validate)


@dataclass(frozen=True)
class Fault:
    """What most ranks call, what the odd one calls, and words for which an error is useful."""

    name: str
    others: Callable[..., Any]
    odd: Callable[..., Any]
    words: list[str]

    def __str__(self) -> str:
        return self.name

    def run(self, group: Any, validate: Validate) -> Any:
        call = self.odd if group.rank() == ODD else self.others
        return call(group, validate)


def _head(**odd: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    return head_scatter, lambda group, validate: head_scatter(group, validate, **odd)


def _output(**odd: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    return output_exchange, lambda group, validate: output_exchange(group, validate, **odd)


FAULTS = [
    Fault("splits, own share", *_head(splits=[4, 5, 2]), ["split", "4, 6, 2", "4, 5, 2", "1"]),
    Fault("splits, a peer's share", *_head(splits=[4, 6, 3]), ["split", "4, 6, 2", "4, 6, 3"]),
    Fault("splits, same sum", *_head(splits=[5, 5, 2]), ["split", "4, 6, 2", "5, 5, 2"]),
    Fault("dtype", *_head(dtype=torch.bfloat16), ["float32", "bfloat16", "1"]),
    Fault("dtype of equal size", *_head(dtype=torch.int32), ["float32", "int32", "1"]),
    Fault("head count", *_head(heads=1), ["head", "1"]),
    Fault("number of inputs", *_head(count=3), ["head", "1"]),
    Fault("head_dim", *_head(head_dim=4), ["head_dim", "8", "4"]),
    # The row keeps its size: nothing but a comparison of the shapes can tell.
    Fault("heads and head_dim", *_head(heads=4, head_dim=4), ["head_dim", "8", "4"]),
    Fault("output splits", *_output(splits=[4, 5, 3]), ["split", "4, 6, 2", "4, 5, 3"]),
    Fault("output splits, other sum", *_output(splits=[4, 5, 2]), ["split", "4, 5, 2"]),
    Fault("output dtype", *_output(dtype=torch.float16), ["float32", "float16"]),
    Fault("output head count", *_output(heads=3), ["head", "2", "3"]),
    Fault("output head_dim", *_output(head_dim=4), ["head_dim", "8", "4"]),
    Fault(
        "the other exchange",
        head_scatter,
        output_exchange,
        ["scatter_heads_gather_seqlen", "scatter_seqlen"],
    ),
    Fault(
        "the other exchange, of the same bytes",
        # Same row shape on the wire: only the name of the call differs, and the counts.
        lambda group, validate: head_scatter(group, validate, count=1),
        output_exchange,
        ["scatter_heads_gather_seqlen", "scatter_seqlen"],
    ),
    Fault(
        "the other exchange, with all splits equal",
        # Counts, rows and dtype agree, so that no transport can tell.
        lambda group, validate: head_scatter(group, validate, count=1, splits=[3, 3, 3]),
        lambda group, validate: output_exchange(group, validate, splits=[3, 3, 3]),
        ["scatter_heads_gather_seqlen", "scatter_seqlen"],
    ),
    Fault(
        "bad input on one rank",
        head_scatter,
        lambda group, validate: scatter_heads_gather_seqlen(
            [torch.ones(6, 7, HEAD_DIM)], SPLITS, group, validate=validate
        ),
        ["7 heads", "3", "1"],
    ),
    Fault(
        "another rank's tokens",
        head_scatter,
        lambda group, validate: scatter_heads_gather_seqlen(
            [torch.ones(5, 6, HEAD_DIM)], SPLITS, group, validate=validate
        ),
        ["5 tokens", "split_sizes[1]=6"],
    ),
    Fault(
        "not contiguous on one rank",
        output_exchange,
        lambda group, validate: scatter_seqlen_gather_heads(
            torch.ones(2, 12, HEAD_DIM).transpose(0, 1), SPLITS, group, validate=validate
        ),
        ["contiguous", "1"],
    ),
]

# Faults after which the bytes on the wire agree all the same: a transport that only compares
# counts, dtypes and row shapes lets them through, checking does not.
AGREE_ON_THE_WIRE = {"the other exchange, with all splits equal"}

# Faults that one rank can see by itself: it raises ValueError, checking or not.
LOCAL = {"bad input on one rank", "another rank's tokens", "not contiguous on one rank"}


def good_exchanges(group: Any, validate: Validate) -> None:
    """Both exchanges, all ranks of one mind, with results checked."""
    for result in head_scatter(group, validate):
        assert result.shape == (sum(SPLITS), HEADS, HEAD_DIM)
        assert (result == 1).all()
    flat = output_exchange(group, validate)
    assert flat.shape == (SPLITS[group.rank()], WORLD * HEADS, HEAD_DIM)
    assert (flat == 1).all()
    shards = output_exchange(group, validate, exchange=scatter_seqlen_gather_head_shards)
    assert (shards == 1).all()
