"""The cases that several test files share: splits, head counts, dtypes, and inputs made of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from tests.bits import quiet_nans, random_bits

HEAD_DIM = 16

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# Balanced, with empty ranks, skewed, everything on one rank, nothing anywhere.
SPLITS: dict[int, list[tuple[int, ...]]] = {
    2: [(7, 6), (0, 5), (9, 2), (13, 0), (0, 0)],
    3: [(5, 4, 4), (0, 7, 1)],
    4: [(5, 5, 5, 4), (2, 1, 0, 0), (6, 3, 5, 1), (0, 0, 9, 0), (0, 0, 0, 0)],
    8: [
        (6, 6, 6, 5, 5, 5, 5, 5),
        (1, 1, 1, 1, 1, 0, 0, 0),
        (7, 2, 5, 3, 1, 4, 6, 2),
        (0, 0, 0, 0, 0, 11, 0, 0),
        (0,) * 8,
    ],
}

WORLDS_AND_SPLITS = [(world, splits) for world in (2, 4, 8) for splits in SPLITS[world]]


class Heads(NamedTuple):
    """Heads per rank and dtype of each input of one exchange."""

    counts: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]

    def __str__(self) -> str:
        names = [str(dtype).removeprefix("torch.") for dtype in self.dtypes]
        return f"{','.join(map(str, self.counts))} {'/'.join(dict.fromkeys(names))}"


def of_one_dtype(counts: tuple[int, ...], dtype: torch.dtype) -> Heads:
    """Return head counts with the same dtype for every input."""
    return Heads(counts, (dtype,) * len(counts))


HEADS = [
    of_one_dtype((3, 3, 3), BF16),
    of_one_dtype((6, 6, 6), BF16),
    of_one_dtype((2, 1, 1), FP32),
    of_one_dtype((1, 3, 2), BF16),
    of_one_dtype((2, 2, 2), FP16),
    Heads((2, 2, 2), (BF16, FP32, BF16)),
    Heads((1, 2, 1), (FP16, BF16, FP16)),  # promotes to a dtype that no input has
]

PACKED_HEADS = [
    of_one_dtype((3, 3, 3), BF16),
    of_one_dtype((6, 6, 6), BF16),
    of_one_dtype((1, 3, 2), BF16),
    of_one_dtype((2, 1, 1), FP32),
    of_one_dtype((4,), FP16),
]


def split_name(value: object) -> str:
    """Name a parameter of a test: splits as `7-6`, heads as they print."""
    if isinstance(value, tuple) and not isinstance(value, Heads):
        return "-".join(map(str, value))
    return str(value)


def inputs_of_rank(
    rank: int,
    split_sizes: Sequence[int],
    heads: Heads,
    head_dim: int = HEAD_DIM,
    seed: int = 0,
) -> list[torch.Tensor]:
    """Return the inputs `[S_r, W*H_i, D]` of one rank: random bits with every special value.

    Inputs that will be promoted hold no signalling NaN, which a conversion may quieten or not.
    """
    promotes = len(set(heads.dtypes)) > 1
    inputs = []
    for index, (count, dtype) in enumerate(zip(heads.counts, heads.dtypes, strict=True)):
        shape = (split_sizes[rank], len(split_sizes) * count, head_dim)
        bits = random_bits(shape, dtype, seed=seed * 10_007 + rank * 101 + index)
        inputs.append(quiet_nans(bits) if promotes else bits)
    return inputs


def inputs_of_all(
    split_sizes: Sequence[int], heads: Heads, head_dim: int = HEAD_DIM, seed: int = 0
) -> list[list[torch.Tensor]]:
    """Return the inputs of every rank, in rank order."""
    return [
        inputs_of_rank(rank, split_sizes, heads, head_dim, seed) for rank in range(len(split_sizes))
    ]


def attention_outputs(
    split_sizes: Sequence[int],
    heads: int,
    dtype: torch.dtype,
    head_dim: int = HEAD_DIM,
    seed: int = 0,
) -> list[torch.Tensor]:
    """Return every rank's attention output `[S, H, D]`, random bits."""
    shape = (sum(split_sizes), heads, head_dim)
    return [
        random_bits(shape, dtype, seed=seed * 10_007 + 53 + rank)
        for rank in range(len(split_sizes))
    ]
