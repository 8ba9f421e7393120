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
        num_warps: Warps per program.
        ranks_first: Whether neighbouring programs serve other ranks or other tokens.
        convert_vec: Most elements in one access where the dtype changes.
        load_policy: Triton's eviction policy for the loads.
    """

    tile_bytes: int = 24576
    max_block: int = 2048
    num_warps: int = 4
    ranks_first: bool = True
    convert_vec: int = 4
    load_policy: str = "evict_first"


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


_Tensors = tuple[torch.Tensor, torch.Tensor]  # source, destination


class _Pair(NamedTuple):
    """One pair as the dense kernel takes it; strides and width as explained at `_dense`."""

    source: torch.Tensor
    destination: torch.Tensor
    source_token: int
    source_rank: int
    destination_token: int
    destination_rank: int
    width: int
    vec: int
    word: int


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
    pairs = [
        (_pointer_like(source), _pointer_like(destination))
        for destination, source in zip(destinations, sources, strict=True)
        if destination.numel()
    ]
    if not pairs:
        return
    device = pairs[0][1].device
    if device.type == "cpu":
        _launch_all(pairs, tile)
        return
    # Triton launches on the current device, whatever device its arguments are on.
    with torch.get_device_module(device).device(device):
        _launch_all(pairs, tile)


def describe_launches(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> str:
    """Which kernels `copy_head_shards_triton` launches for this copy, in words."""
    pairs = [pair for pair in zip(sources, destinations, strict=True) if pair[1].numel()]
    launches = [
        f"the {'dense' if _is_dense(batch) else 'strided'} kernel for {len(batch)} pairs"
        for batch in _batches(pairs)
    ]
    return f"{len(launches)} launches: {', '.join(launches)}".replace("1 launches", "1 launch")


def _batches(pairs: list[_Tensors]) -> list[list[_Tensors]]:
    return [pairs[start : start + MAX_PAIRS] for start in range(0, len(pairs), MAX_PAIRS)]


def _launch_all(pairs: list[_Tensors], tile: CopyTile) -> None:
    for batch in _batches(pairs):
        if _is_dense(batch):
            _launch_dense([_plan(*pair, tile) for pair in batch], tile)
        else:
            _launch_strided(batch, tile)


def _is_dense(batch: list[_Tensors]) -> bool:
    return all(_is_chunked(tensor) for pair in batch for tensor in pair)


def _pointer_like(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or its bits where Triton has no pointer to its dtype."""
    if tensor.dtype in _POINTER_DTYPES:
        return tensor
    return tensor.view(_INTEGERS[tensor.element_size()])


def _is_chunked(tensor: torch.Tensor) -> bool:
    """Whether `[t, d]` is one run of `H * D` adjacent elements."""
    _, _, num_heads, head_dim = tensor.shape
    _, _, head_stride, dim_stride = tensor.stride()
    return (head_dim == 1 or dim_stride == 1) and (num_heads == 1 or head_stride == head_dim)


def _plan(source: torch.Tensor, destination: torch.Tensor, tile: CopyTile) -> _Pair:
    """Choose the widest words that every address of the pair allows."""
    _, _, num_heads, head_dim = source.shape
    chunk = num_heads * head_dim
    source_token, source_rank, _, _ = source.stride()
    destination_token, destination_rank, _, _ = destination.stride()
    # The lowest bit set in any of these is the largest power of two that divides all of them.
    steps = chunk | source_token | source_rank | destination_token | destination_rank
    if source.dtype == destination.dtype:
        itemsize = source.element_size()
        addresses = steps * itemsize | source.data_ptr() | destination.data_ptr()
        group = min(addresses & -addresses, 16)
        word = min(group, 8)
        vec, width = group // word, chunk * itemsize // word
    else:
        itemsize, word = 1, 0
        group = vec = min(steps & -steps, tile.convert_vec)
        width = chunk
    return _Pair(
        source,
        destination,
        source_token * itemsize // group,
        source_rank * itemsize // group,
        destination_token * itemsize // group,
        destination_rank * itemsize // group,
        width,
        vec,
        word,
    )


def _rows(pairs: Sequence[tuple[torch.Tensor, ...]], tile: CopyTile) -> int:
    """Tokens per program: the largest power of two that stores no more than the goal."""
    row_bytes = sum(pair[1].shape[2] * pair[1].shape[3] * pair[1].element_size() for pair in pairs)
    return 1 << (max(1, tile.tile_bytes // row_bytes).bit_length() - 1)


def _blocks(widths: list[int], rows: int, tile: CopyTile) -> tuple[list[int], int]:
    """Lanes per pair, and the parts into which the tiles must be cut to fit them."""
    blocks = [min(1 << (rows * width - 1).bit_length(), tile.max_block) for width in widths]
    parts = max(-(-rows * width // block) for width, block in zip(widths, blocks, strict=True))
    return blocks, parts


def _launch_dense(pairs: list[_Pair], tile: CopyTile) -> None:
    num_tokens, world_size, _, _ = pairs[0].source.shape
    rows = _rows(pairs, tile)
    blocks, parts = _blocks([pair.width for pair in pairs], rows, tile)
    arguments: list[object] = []
    shapes: list[int] = []
    for i in range(MAX_PAIRS):
        # Places without a pair repeat the first one; PAIRS keeps the kernel away from them.
        pair = pairs[i] if i < len(pairs) else pairs[0]
        arguments += pair[:6]
        shapes += (*pair[6:], blocks[i] if i < len(pairs) else 1)
    copy_head_shards_kernel[(-(-num_tokens // rows) * world_size * parts,)](
        *arguments,
        num_tokens,
        world_size,
        *shapes,
        len(pairs),
        rows,
        parts,
        tile.ranks_first,
        tile.load_policy,
        num_warps=tile.num_warps,
    )


def _launch_strided(pairs: list[_Tensors], tile: CopyTile) -> None:
    num_tokens, world_size, _, _ = pairs[0][0].shape
    rows = _rows(pairs, tile)
    widths = [source.shape[2] * source.shape[3] for source, _ in pairs]
    blocks, parts = _blocks(widths, rows, tile)
    arguments: list[object] = []
    shapes: list[int] = []
    for i in range(MAX_PAIRS):
        source, destination = pairs[i] if i < len(pairs) else pairs[0]
        arguments += (source, destination, *source.stride(), *destination.stride())
        word = source.element_size() if source.dtype == destination.dtype else 0
        _, _, num_heads, head_dim = source.shape
        shapes += (num_heads, head_dim, word, blocks[i] if i < len(pairs) else 1)
    copy_strided_head_shards_kernel[(-(-num_tokens // rows) * world_size * parts,)](
        *arguments,
        num_tokens,
        world_size,
        *shapes,
        len(pairs),
        rows,
        parts,
        tile.ranks_first,
        tile.load_policy,
        num_warps=tile.num_warps,
    )
