# ruff: noqa: N803
"""The copy of head shards with any strides: transposed sources, slices of heads, gaps anywhere."""

import triton
import triton.language as tl

from ulysses_comm.kernels.words import load_words, program_place, store_words


@triton.jit
def _offsets(
    lane,
    first,
    rank,
    token_stride,
    rank_stride,
    head_stride,
    dim_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Element offsets of `lane`, which counts tokens, then heads, then channels."""
    token = first + lane // (HEADS * DIM)
    head = (lane // DIM % HEADS).to(tl.int64)
    dim = (lane % DIM).to(tl.int64)
    base = rank * rank_stride
    return base + token * token_stride + head * head_stride + dim * dim_stride


@triton.jit
def _move(
    source,
    destination,
    source_token,
    source_rank,
    source_head,
    source_dim,
    destination_token,
    destination_rank,
    destination_head,
    destination_dim,
    first,
    rank,
    part,
    rows,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WORD: tl.constexpr,
    BLOCK: tl.constexpr,
    POLICY: tl.constexpr,
):
    lane = part * BLOCK + tl.arange(0, BLOCK)
    mask = lane < rows * (HEADS * DIM)
    offsets = _offsets(
        lane, first, rank, source_token, source_rank, source_head, source_dim, HEADS, DIM
    )
    value = load_words(source, offsets, mask, WORD, POLICY)
    offsets = _offsets(
        lane,
        first,
        rank,
        destination_token,
        destination_rank,
        destination_head,
        destination_dim,
        HEADS,
        DIM,
    )
    store_words(destination, offsets, value, mask, WORD)


@triton.jit(do_not_specialize=["num_tokens", "world_size"])
def copy_strided_head_shards_kernel(
    source0,
    destination0,
    source0_token,
    source0_rank,
    source0_head,
    source0_dim,
    destination0_token,
    destination0_rank,
    destination0_head,
    destination0_dim,
    source1,
    destination1,
    source1_token,
    source1_rank,
    source1_head,
    source1_dim,
    destination1_token,
    destination1_rank,
    destination1_head,
    destination1_dim,
    source2,
    destination2,
    source2_token,
    source2_rank,
    source2_head,
    source2_dim,
    destination2_token,
    destination2_rank,
    destination2_head,
    destination2_dim,
    source3,
    destination3,
    source3_token,
    source3_rank,
    source3_head,
    source3_dim,
    destination3_token,
    destination3_rank,
    destination3_head,
    destination3_dim,
    num_tokens,
    world_size,
    HEADS0: tl.constexpr,
    DIM0: tl.constexpr,
    WORD0: tl.constexpr,
    BLOCK0: tl.constexpr,
    HEADS1: tl.constexpr,
    DIM1: tl.constexpr,
    WORD1: tl.constexpr,
    BLOCK1: tl.constexpr,
    HEADS2: tl.constexpr,
    DIM2: tl.constexpr,
    WORD2: tl.constexpr,
    BLOCK2: tl.constexpr,
    HEADS3: tl.constexpr,
    DIM3: tl.constexpr,
    WORD3: tl.constexpr,
    BLOCK3: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    RANKS_FIRST: tl.constexpr,
    POLICY: tl.constexpr,
):
    """Up to four pairs `[S, W, HEADS, DIM]` with four strides a side, counted in elements."""
    first, rank, part = program_place(num_tokens, world_size, ROWS, PARTS, RANKS_FIRST)
    rows = tl.minimum(num_tokens - first, ROWS).to(tl.int32)
    _move(
        source0,
        destination0,
        source0_token,
        source0_rank,
        source0_head,
        source0_dim,
        destination0_token,
        destination0_rank,
        destination0_head,
        destination0_dim,
        first,
        rank,
        part,
        rows,
        HEADS0,
        DIM0,
        WORD0,
        BLOCK0,
        POLICY,
    )
    if PAIRS > 1:
        _move(
            source1,
            destination1,
            source1_token,
            source1_rank,
            source1_head,
            source1_dim,
            destination1_token,
            destination1_rank,
            destination1_head,
            destination1_dim,
            first,
            rank,
            part,
            rows,
            HEADS1,
            DIM1,
            WORD1,
            BLOCK1,
            POLICY,
        )
    if PAIRS > 2:
        _move(
            source2,
            destination2,
            source2_token,
            source2_rank,
            source2_head,
            source2_dim,
            destination2_token,
            destination2_rank,
            destination2_head,
            destination2_dim,
            first,
            rank,
            part,
            rows,
            HEADS2,
            DIM2,
            WORD2,
            BLOCK2,
            POLICY,
        )
    if PAIRS > 3:
        _move(
            source3,
            destination3,
            source3_token,
            source3_rank,
            source3_head,
            source3_dim,
            destination3_token,
            destination3_rank,
            destination3_head,
            destination3_dim,
            first,
            rank,
            part,
            rows,
            HEADS3,
            DIM3,
            WORD3,
            BLOCK3,
            POLICY,
        )
