# ruff: noqa: N803
"""One Triton launch that copies every head shard of q, k and v into its place.

A pair is a source and a destination of the same shape `[S, W, H, D]`. For a token `t` and a rank
`d` the elements `[t, d]` are a *chunk*. In the usual layouts a chunk is `H * D` adjacent elements
on both sides, so a pair is a list of chunk moves, and the dense kernel below knows nothing of
heads. One program moves the chunks of a few tokens for one rank, for every pair: in a send buffer
`[W, S, sum(H), D]` that is one uninterrupted run of bytes. All loads are issued before the first
store.

Example: 5 tokens, ROWS = 2 tokens a program, WIDTH = 3 words a chunk, BLOCK = 8 lanes. Program
`tile = 1` owns tokens 2 and 3; its lanes move

    lane            0  1  2  3  4  5  6  7
    lane // WIDTH   0  0  0  1  1  1  .  .   token within the tile (lanes 6, 7 are masked)
    lane % WIDTH    0  1  2  0  1  2  .  .   word within the chunk

and `tile = 2` owns token 4 alone, so that only its lanes 0 to 2 are on.

Equal dtypes move as integers of up to 8 bytes, in groups of VEC words that make up to 16 bytes:
every bit survives. bfloat16 widens to float32 by a shift, which also keeps every bit of a NaN.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ulysses_comm.kernels.strided_copies import copy_strided_head_shards_kernel
from ulysses_comm.kernels.words import load_words, program_place, store_words

MAX_PAIRS = 4
# What Triton can take as a pointer everywhere; others travel as integers of the same size.
_POINTER_DTYPES = frozenset(
    {torch.bfloat16, torch.float16, torch.float32, torch.float64}
    | {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool}
)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_STRIDES = [
    f"{side}{i}_{axis}"
    for i in range(MAX_PAIRS)
    for side in ("source", "destination")
    for axis in ("token", "rank")
]


class CopyTile(NamedTuple):
    """How the copy is cut into programs; every choice gives the same bytes.

    Attributes:
        tile_bytes: Bytes one program should write; rounded down to a power of two of tokens.
        max_block: Most words one program moves for one pair; longer chunks are cut.
        num_warps: Most warps per program; fewer where a pair is so narrow that a thread's share of
            it would be less than one wide access.
        ranks_first: Whether neighbouring programs serve other ranks or other tokens.
        convert_vec: Most elements in one access where the dtype changes.
        load_policy: Triton's eviction policy for the loads.
    """

    tile_bytes: int = 20000
    max_block: int = 2048
    num_warps: int = 8
    ranks_first: bool = True
    convert_vec: int = 8
    load_policy: str = ""


DEFAULT_TILE = CopyTile()


@triton.jit
def _dense(lane, first, rank, token_stride, rank_stride, WIDTH: tl.constexpr, VEC: tl.constexpr):
    """Word offsets of `lane`; strides count groups of VEC words, which shows their alignment."""
    base = (first * token_stride + rank * rank_stride) * VEC
    return base + ((lane // WIDTH).to(tl.int64) * token_stride * VEC + lane % WIDTH)


@triton.jit(do_not_specialize=["num_tokens", "world_size", *_STRIDES])
def copy_head_shards_kernel(
    source0,
    destination0,
    source0_token,
    source0_rank,
    destination0_token,
    destination0_rank,
    source1,
    destination1,
    source1_token,
    source1_rank,
    destination1_token,
    destination1_rank,
    source2,
    destination2,
    source2_token,
    source2_rank,
    destination2_token,
    destination2_rank,
    source3,
    destination3,
    source3_token,
    source3_rank,
    destination3_token,
    destination3_rank,
    num_tokens,
    world_size,
    WIDTH0: tl.constexpr,
    VEC0: tl.constexpr,
    WORD0: tl.constexpr,
    BLOCK0: tl.constexpr,
    WIDTH1: tl.constexpr,
    VEC1: tl.constexpr,
    WORD1: tl.constexpr,
    BLOCK1: tl.constexpr,
    WIDTH2: tl.constexpr,
    VEC2: tl.constexpr,
    WORD2: tl.constexpr,
    BLOCK2: tl.constexpr,
    WIDTH3: tl.constexpr,
    VEC3: tl.constexpr,
    WORD3: tl.constexpr,
    BLOCK3: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    RANKS_FIRST: tl.constexpr,
    POLICY: tl.constexpr,
):
    """Up to four pairs whose chunks are `H * D` adjacent elements on both sides."""
    first, rank, part = program_place(num_tokens, world_size, ROWS, PARTS, RANKS_FIRST)
    rows = tl.minimum(num_tokens - first, ROWS).to(tl.int32)

    lane0 = part * BLOCK0 + tl.arange(0, BLOCK0)
    mask0 = lane0 < rows * WIDTH0
    from0 = _dense(lane0, first, rank, source0_token, source0_rank, WIDTH0, VEC0)
    value0 = load_words(source0, from0, mask0, WORD0, POLICY)
    if PAIRS > 1:
        lane1 = part * BLOCK1 + tl.arange(0, BLOCK1)
        mask1 = lane1 < rows * WIDTH1
        from1 = _dense(lane1, first, rank, source1_token, source1_rank, WIDTH1, VEC1)
        value1 = load_words(source1, from1, mask1, WORD1, POLICY)
    if PAIRS > 2:
        lane2 = part * BLOCK2 + tl.arange(0, BLOCK2)
        mask2 = lane2 < rows * WIDTH2
        from2 = _dense(lane2, first, rank, source2_token, source2_rank, WIDTH2, VEC2)
        value2 = load_words(source2, from2, mask2, WORD2, POLICY)
    if PAIRS > 3:
        lane3 = part * BLOCK3 + tl.arange(0, BLOCK3)
        mask3 = lane3 < rows * WIDTH3
        from3 = _dense(lane3, first, rank, source3_token, source3_rank, WIDTH3, VEC3)
        value3 = load_words(source3, from3, mask3, WORD3, POLICY)

    to0 = _dense(lane0, first, rank, destination0_token, destination0_rank, WIDTH0, VEC0)
    store_words(destination0, to0, value0, mask0, WORD0)
    if PAIRS > 1:
        to1 = _dense(lane1, first, rank, destination1_token, destination1_rank, WIDTH1, VEC1)
        store_words(destination1, to1, value1, mask1, WORD1)
    if PAIRS > 2:
        to2 = _dense(lane2, first, rank, destination2_token, destination2_rank, WIDTH2, VEC2)
        store_words(destination2, to2, value2, mask2, WORD2)
    if PAIRS > 3:
        to3 = _dense(lane3, first, rank, destination3_token, destination3_rank, WIDTH3, VEC3)
        store_words(destination3, to3, value3, mask3, WORD3)


_Pair = tuple[torch.Tensor, torch.Tensor]  # source, destination


class _Layout(NamedTuple):
    """All that a plan depends on, for one pair."""

    shape: tuple[int, ...]
    source_strides: tuple[int, ...]
    destination_strides: tuple[int, ...]
    source_dtype: torch.dtype
    destination_dtype: torch.dtype
    address: int  # both addresses or-ed, modulo 16


class _Launch(NamedTuple):
    """One launch but for its tensors, which come before the strides of their place."""

    dense: bool
    programs: int
    num_warps: int
    strides: list[tuple[int, ...]]
    constants: tuple[object, ...]


def copy_head_shards_triton(
    destinations: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    *,
    tile: CopyTile = DEFAULT_TILE,
) -> None:
    """Same bytes as `copy_head_shards_torch`, in one launch for up to four pairs.

    Args:
        destinations: `[S, W, H_i, D_i]` each, any strides, not overlapping; all on one GPU (or on
            the CPU under Triton's interpreter).
        sources: The same shapes, any strides; a destination's dtype or bfloat16 or float16
            for a float32 destination.
        tile: How the work is cut; no choice changes the result.

    `copy_head_shards` checks all of this; here it is taken for granted. Chunks that are one run of
    memory on both sides go through the fast kernel; any other stride in any pair of a launch
    sends that launch through the strided one.
    """
    batches = _batches(destinations, sources)
    if not batches:
        return
    device = destinations[0].device
    if device.type == "cpu":
        _launch_all(batches, tile)
        return
    # Triton launches on the current device, whatever device its arguments are on.
    with torch.get_device_module(device).device(device):
        _launch_all(batches, tile)


def describe_launches(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> str:
    """Which kernels `copy_head_shards_triton` launches for this copy, in words."""
    launches = []
    for batch in _batches(destinations, sources):
        kind = "dense" if _plan(_layouts(batch), DEFAULT_TILE).dense else "strided"
        launches.append(f"the {kind} kernel for {len(batch)} pair{'s' * (len(batch) > 1)}")
    return f"{len(launches)} launch{'es' * (len(launches) > 1)}: {', '.join(launches)}"


def _batches(
    destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
) -> list[list[_Pair]]:
    """The pairs that hold anything, as many together as one launch takes."""
    pairs = [
        (_pointer_like(source), _pointer_like(destination))
        for destination, source in zip(destinations, sources, strict=True)
        if destination.numel()
    ]
    return [pairs[start : start + MAX_PAIRS] for start in range(0, len(pairs), MAX_PAIRS)]


def _pointer_like(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or its bits where Triton has no pointer to its dtype."""
    if tensor.dtype in _POINTER_DTYPES:
        return tensor
    return tensor.view(_INTEGERS[tensor.element_size()])


def _launch_all(batches: list[list[_Pair]], tile: CopyTile) -> None:
    for batch in batches:
        launch = _plan(_layouts(batch), tile)
        arguments: list[object] = []
        for place, strides in enumerate(launch.strides):
            # Places without a pair repeat the first one; PAIRS keeps the kernel away from them.
            arguments += batch[place] if place < len(batch) else batch[0]
            arguments += strides
        kernel = copy_head_shards_kernel if launch.dense else copy_strided_head_shards_kernel
        kernel[(launch.programs,)](*arguments, *launch.constants, num_warps=launch.num_warps)


def _layouts(batch: list[_Pair]) -> tuple[_Layout, ...]:
    return tuple(
        _Layout(
            source.shape,
            source.stride(),
            destination.stride(),
            source.dtype,
            destination.dtype,
            (source.data_ptr() | destination.data_ptr()) & 15,
        )
        for source, destination in batch
    )


# Cached because at small sizes the host is what a copy waits for.
@functools.lru_cache(maxsize=1024)
def _plan(layouts: tuple[_Layout, ...], tile: CopyTile) -> _Launch:
    """Choose the kernel, the words and the cut for pairs of these layouts."""
    num_tokens, world_size, _, _ = layouts[0].shape
    dense = all(map(_is_dense, layouts))
    places = [(_dense_place if dense else _strided_place)(layout, tile) for layout in layouts]
    row_bytes = sum(
        layout.shape[2] * layout.shape[3] * layout.destination_dtype.itemsize for layout in layouts
    )
    # The largest power of two of tokens that stores no more than the goal.
    rows = 1 << (max(1, tile.tile_bytes // row_bytes).bit_length() - 1)
    lanes = [rows * width for _, width, _ in places]
    blocks = [min(1 << (count - 1).bit_length(), tile.max_block) for count in lanes]
    # Tiles whose chunks are longer than a block are cut into parts, one program each.
    parts = max(-(-count // block) for count, block in zip(lanes, blocks, strict=True))
    shapes: list[int] = []
    for place in range(MAX_PAIRS):
        used = place < len(places)
        shapes += (*places[place if used else 0][2], blocks[place] if used else 1)
    return _Launch(
        dense,
        -(-num_tokens // rows) * world_size * parts,
        _warps(places, blocks, tile) if dense else tile.num_warps,
        [places[place if place < len(places) else 0][0] for place in range(MAX_PAIRS)],
        (
            num_tokens,
            world_size,
            *shapes,
            len(places),
            rows,
            parts,
            tile.ranks_first,
            tile.load_policy,
        ),
    )


def _warps(
    places: list[tuple[tuple[int, ...], int, tuple[int, ...]]], blocks: list[int], tile: CopyTile
) -> int:
    """As many warps as still find one wide access per thread in the narrowest pair."""
    accesses = min(block // shape[1] for (_, _, shape), block in zip(places, blocks, strict=True))
    return max(1, min(tile.num_warps, accesses // 32))


def _is_dense(layout: _Layout) -> bool:
    """Whether `[t, d]` is one run of `H * D` adjacent elements on both sides."""
    _, _, num_heads, head_dim = layout.shape
    return all(
        (head_dim == 1 or strides[3] == 1) and (num_heads == 1 or strides[2] == head_dim)
        for strides in (layout.source_strides, layout.destination_strides)
    )


def _dense_place(layout: _Layout, tile: CopyTile) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
    """Strides, width and (WIDTH, VEC, WORD): the widest words that every address allows."""
    chunk = layout.shape[2] * layout.shape[3]
    strides = (*layout.source_strides[:2], *layout.destination_strides[:2])
    # The lowest bit set in any of these is the largest power of two that divides all of them.
    steps = chunk
    for stride in strides:
        steps |= stride
    if layout.source_dtype == layout.destination_dtype:
        itemsize = layout.source_dtype.itemsize
        addresses = steps * itemsize | layout.address
        group = min(addresses & -addresses, 16)
        word = min(group, 8)
        vec, width = group // word, chunk * itemsize // word
    else:
        itemsize, word = 1, 0
        group = vec = min(steps & -steps, tile.convert_vec)
        width = chunk
    # In groups of VEC words, so that the kernel's multiplication by VEC shows the alignment.
    in_groups = tuple(stride * itemsize // group for stride in strides)
    return in_groups, width, (width, vec, word)


def _strided_place(layout: _Layout, tile: CopyTile) -> tuple[tuple[int, ...], int, tuple[int, ...]]:
    """Strides, width and (HEADS, DIM, WORD), all in elements."""
    _, _, num_heads, head_dim = layout.shape
    same = layout.source_dtype == layout.destination_dtype
    word = layout.source_dtype.itemsize if same else 0
    strides = (*layout.source_strides, *layout.destination_strides)
    return strides, num_heads * head_dim, (num_heads, head_dim, word)
