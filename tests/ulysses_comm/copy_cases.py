"""The copies that every form of `copy_head_shards` must get right, and how a result is judged.

Needs no pytest, so that the same cases run under Triton's interpreter in a process of their own.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable, Sequence

import torch

from tests.bits import assert_same_bits, quiet_nans, random_bits

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
POISON = 0xA5

Copy = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None]


@dataclasses.dataclass(frozen=True)
class Case:
    """One copy into a send buffer `[W, S, sum(heads) + gap, D]`, poisoned before.

    Attributes:
        tokens: S; world_size: W; heads: per input; head_dim: D.
        sources: Dtype of each input.
        destination: Dtype of the buffer.
        layout: How each source lies in memory; see `_source`.
        gap: Heads of the buffer that no input fills.
        offset: Elements between the start of the storage and the buffer: breaks its alignment.
    """

    tokens: int
    world_size: int
    heads: tuple[int, ...] = (3, 3, 3)
    head_dim: int = 16
    sources: tuple[torch.dtype, ...] = (BF16, BF16, BF16)
    destination: torch.dtype = BF16
    layout: str = "separate"
    gap: int = 0
    offset: int = 0

    def __str__(self) -> str:
        dtypes = "+".join(
            str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(self.sources)
        )
        into = str(self.destination).removeprefix("torch.")
        heads = "+".join(map(str, self.heads))
        return (
            f"S{self.tokens}-W{self.world_size}-H{heads}-D{self.head_dim}-{dtypes}-{into}-"
            f"{self.layout}-gap{self.gap}-offset{self.offset}"
        )


def _uniform(dtype: torch.dtype, count: int = 3, **options: object) -> dict[str, object]:
    return {"sources": (dtype,) * count, "destination": dtype, **options}


LAYOUTS = ("separate", "fused", "heads first", "dims first", "channels sliced", "expanded")
CASES: list[Case] = [
    # Sizes that no tile divides, and every head count of the exchange's acceptance list.
    *(
        Case(tokens, world_size, heads, head_dim, (BF16,) * len(heads))
        for tokens, world_size, heads, head_dim in [
            (1, 1, (1, 1, 1), 1),
            (1, 8, (3, 3, 3), 128),
            (63, 2, (2, 1, 1), 128),
            (63, 8, (1, 3, 2), 7),
            (64, 4, (6, 6, 6), 16),
            (5, 3, (3, 3, 3), 1),
            (13, 9, (1, 3, 2), 24),
            (2, 2, (200, 3), 128),  # a chunk that one program can't hold
        ]
    ),
    # One to six inputs: four go into one launch.
    *(
        Case(7, 2, tuple(range(1, n + 1)), 16, (BF16,) * n, BF16)
        for n in range(1, 7)
    ),
    # Every dtype, moved as it is.
    *(
        Case(9, 3, (2, 1, 1), head_dim, **_uniform(dtype))  # type: ignore[arg-type]
        for head_dim in (7, 16)
        for dtype in (
            FP16, FP32, FP64, torch.int8, torch.uint8, torch.int64, torch.bool,
            torch.float8_e4m3fn, torch.float8_e5m2,
        )
    ),
    # Every way a source may lie, dense and not, aligned and not.
    *(
        Case(11, 4, (2, 1, 3), head_dim, **_uniform(dtype, layout=layout))  # type: ignore[arg-type]
        for layout, head_dim, dtype in itertools.product(LAYOUTS, (7, 32), (BF16, FP32))
    ),
    # Promotion in the copy.
    *(
        Case(11, 4, (2, 1, 3), head_dim, sources, FP32, layout)
        for layout in ("separate", "heads first")
        for head_dim in (7, 32)
        for sources in ((BF16, FP32, BF16), (BF16, FP16, BF16), (FP16, FP16, FP32))
    ),
    # Buffers with a gap, and buffers that start anywhere.
    *(
        Case(10, 4, (2, 1, 3), 16, gap=gap, offset=offset)
        for gap in (0, 1)
        for offset in (1, 2, 4, 8)
    ),
    Case(10, 4, (2, 1, 3), 16, (BF16, FP32, FP16), FP32, gap=1, offset=3),
]  # fmt: skip


def run(case: Case, copy: Copy, device: str) -> None:
    """Copy, and compare every bit of the whole storage with what `copy_` per shard leaves there."""
    destinations, storage = _destinations(case, device)
    expected_views, expected = _destinations(case, device)
    sources = [_source(case, i).to(device) for i in range(len(case.heads))]
    sources = [_relayout(case, source) for source in sources]
    for view, source in zip(expected_views, sources, strict=True):
        for rank in range(case.world_size):
            view[:, rank] = source[:, rank]
    before = [source.clone() for source in sources]
    copy(destinations, sources)
    assert_same_bits(storage, expected, f"{case}: destination storage")
    for source, old in zip(sources, before, strict=True):
        assert_same_bits(source, old, f"{case}: source, which must not change")


def _destinations(case: Case, device: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The head-shard views of a poisoned buffer, and the storage they lie in, as bytes."""
    heads = sum(case.heads) + case.gap
    count = case.world_size * case.tokens * heads * case.head_dim
    size = case.destination.itemsize
    storage = torch.full(((count + case.offset + 5) * size,), POISON, dtype=torch.uint8).to(device)
    elements = storage[case.offset * size : (case.offset + count) * size].view(case.destination)
    buffer = elements.view(case.world_size, case.tokens, heads, case.head_dim).transpose(0, 1)
    return list(buffer.split([*case.heads, case.gap], dim=2))[: len(case.heads)], storage


def _source(case: Case, i: int) -> torch.Tensor:
    dtype = case.sources[i]
    shape = (case.tokens, case.world_size, case.heads[i], case.head_dim)
    source = random_bits(shape, dtype, seed=17 * i + 1)
    # Whether a conversion quietens a signalling NaN is the hardware's business; see copies.py.
    return source if dtype == case.destination or dtype == BF16 else quiet_nans(source)


def _relayout(case: Case, source: torch.Tensor) -> torch.Tensor:
    """The same values, lying as the case says."""
    if case.layout == "separate":
        return source
    if case.layout == "heads first":  # [W, H, S, D], as attention kernels keep it
        return source.permute(1, 2, 0, 3).contiguous().permute(2, 0, 1, 3)
    if case.layout == "dims first":  # the last stride is not 1
        return source.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    if case.layout == "expanded":  # one head that stands for all
        return source[:, :, :1].expand_as(source)
    if case.layout == "fused":  # a slice of one projection's output, token stride wider
        wide = source.new_empty(case.tokens, 3, *source.shape[1:])
        wide[:, 1] = source
        return wide[:, 1]
    assert case.layout == "channels sliced", case.layout
    wide = source.new_empty(*source.shape[:3], 2 * case.head_dim + 1)
    wide[..., 1 : 1 + case.head_dim] = source
    return wide[..., 1 : 1 + case.head_dim]


def main(device: str = "cpu") -> None:
    """Run every case through the Triton form: on a GPU, or on the CPU under the interpreter."""
    from ulysses_comm.kernels.copies import copy_head_shards_triton

    for case in CASES:
        run(case, copy_head_shards_triton, device)
    print(f"{len(CASES)} cases right on {device}")


if __name__ == "__main__":
    main(*sys.argv[1:])
