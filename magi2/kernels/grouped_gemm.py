"""Grouped products over blocks of rows that share an expert.

A block is `BLOCK_M` slots of `BlockRoutes`; each holds a route number, or `num_routes` where it is
empty. Route r reads row `r // TOP_K` of x, which is `token * heads + head`, and writes row r of the
result. Programs own one tile of one block, or walk over tiles with a stride (`PERSISTENT`). Tiles
are numbered in groups of `GROUP_M` blocks per sweep over the columns:

    GROUP_M = 2, 3 column tiles:    block 0:  0 2 4      block 2:  6 8 10
                                    block 1:  1 3 5      block 3:  7 9 11

so that programs that run together share both their weights and their rows in the L2 cache.

Every output element is the sum of ascending depth tiles in one float32 accumulator of one program:
no atomics, no split depth, the same bits in each run, and the bits of a row do not depend on the
block, slot or batch it is in.

`INTERPRETED` is explained in expert_blocks.py.
"""

import triton
import triton.language as tl

from magi2.kernels.expert_blocks import (
    activate,
    load_rows,
    load_weight,
    multiply,
    narrow,
    store_weighted,
    x_rows,
)


@triton.jit
def tile_place(tile, num_blocks, TILES_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Block and column tile of a tile number."""
    group = tile // (GROUP_M * TILES_N)
    first = group * GROUP_M
    height = tl.minimum(num_blocks - first, GROUP_M)
    inside = tile % (GROUP_M * TILES_N)
    return first + inside % height, inside // height


@triton.jit
def _gate_up_tile(
    tile,
    num_blocks,
    x,
    w_gate,
    w_up,
    hidden,
    slots,
    block_expert,
    num_routes,
    token_stride,
    head_stride,
    HEADS: tl.constexpr,
    TOP_K: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    block, tile_n = tile_place(tile, num_blocks, (F + BLOCK_N - 1) // BLOCK_N, GROUP_M)
    expert = tl.load(block_expert + block)
    route = tl.load(slots + block * BLOCK_M + tl.arange(0, BLOCK_M))
    rows = x_rows(x, route, num_routes, token_stride, head_stride, HEADS, TOP_K)
    n = tile_n * BLOCK_N
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, D, BLOCK_K):
        a = load_rows(rows, k, D, BLOCK_K)
        b = load_weight(w_gate, expert, k, n, D, F, BLOCK_K, BLOCK_N, DESCRIPTORS)
        gate = multiply(a, b, gate, INTERPRETED)
        b = load_weight(w_up, expert, k, n, D, F, BLOCK_K, BLOCK_N, DESCRIPTORS)
        up = multiply(a, b, up, INTERPRETED)
    columns = n + tl.arange(0, BLOCK_N)
    address = hidden + route.to(tl.int64)[:, None] * F + columns[None, :]
    inside = (route < num_routes)[:, None] & (columns < F)[None, :]
    tl.store(address, narrow(activate(gate, up), hidden.dtype.element_ty, INTERPRETED), mask=inside)


@triton.jit(do_not_specialize=["num_routes"])
def gate_up_kernel(
    x,
    w_gate,
    w_up,
    hidden,
    slots,
    block_expert,
    padded_total,
    num_routes,
    token_stride,
    head_stride,
    HEADS: tl.constexpr,
    TOP_K: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PERSISTENT: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """`hidden[r] = swiglu7(x[r // TOP_K] @ w_gate, x[r // TOP_K] @ w_up)`, rounded once.

    x is strided (tokens, heads, D); the weights are [experts, D, F], as descriptors of blocks
    [1, BLOCK_K, BLOCK_N] where DESCRIPTORS; hidden is [routes, F].
    """
    num_blocks = tl.load(padded_total) // BLOCK_M
    num_tiles = num_blocks * ((F + BLOCK_N - 1) // BLOCK_N)
    # A program beyond the last tile has none; without PERSISTENT the others have one.
    first = tl.program_id(0)
    if PERSISTENT:
        tile = first
        while tile < num_tiles:
            _gate_up_tile(
                tile,
                num_blocks,
                x,
                w_gate,
                w_up,
                hidden,
                slots,
                block_expert,
                num_routes,
                token_stride,
                head_stride,
                HEADS,
                TOP_K,
                D,
                F,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
                GROUP_M,
                DESCRIPTORS,
                INTERPRETED,
            )
            tile += tl.num_programs(0)
    elif first < num_tiles:
        _gate_up_tile(
            first,
            num_blocks,
            x,
            w_gate,
            w_up,
            hidden,
            slots,
            block_expert,
            num_routes,
            token_stride,
            head_stride,
            HEADS,
            TOP_K,
            D,
            F,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            GROUP_M,
            DESCRIPTORS,
            INTERPRETED,
        )


@triton.jit
def _down_tile(
    tile,
    num_blocks,
    hidden,
    w_down,
    out,
    weights,
    slots,
    block_expert,
    num_routes,
    D: tl.constexpr,
    F: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    block, tile_n = tile_place(tile, num_blocks, (D + BLOCK_N - 1) // BLOCK_N, GROUP_M)
    expert = tl.load(block_expert + block)
    route = tl.load(slots + block * BLOCK_M + tl.arange(0, BLOCK_M))
    rows = hidden + tl.where(route < num_routes, route, 0).to(tl.int64) * F
    n = tile_n * BLOCK_N
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, F, BLOCK_K):
        a = load_rows(rows, k, F, BLOCK_K)
        b = load_weight(w_down, expert, k, n, F, D, BLOCK_K, BLOCK_N, DESCRIPTORS)
        total = multiply(a, b, total, INTERPRETED)
    columns = n + tl.arange(0, BLOCK_N)
    store_weighted(out, total, weights, route, num_routes, columns, D, INTERPRETED)


@triton.jit(do_not_specialize=["num_routes"])
def down_kernel(
    hidden,
    w_down,
    out,
    weights,
    slots,
    block_expert,
    padded_total,
    num_routes,
    D: tl.constexpr,
    F: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PERSISTENT: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """`out[r] = hidden[r] @ w_down * weights[r]`, rounded once.

    hidden is [routes, F], w_down [experts, F, D], weights [routes] float32, out [routes, D].
    """
    num_blocks = tl.load(padded_total) // BLOCK_M
    num_tiles = num_blocks * ((D + BLOCK_N - 1) // BLOCK_N)
    first = tl.program_id(0)
    if PERSISTENT:
        tile = first
        while tile < num_tiles:
            _down_tile(
                tile,
                num_blocks,
                hidden,
                w_down,
                out,
                weights,
                slots,
                block_expert,
                num_routes,
                D,
                F,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
                GROUP_M,
                DESCRIPTORS,
                INTERPRETED,
            )
            tile += tl.num_programs(0)
    elif first < num_tiles:
        _down_tile(
            first,
            num_blocks,
            hidden,
            w_down,
            out,
            weights,
            slots,
            block_expert,
            num_routes,
            D,
            F,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            GROUP_M,
            DESCRIPTORS,
            INTERPRETED,
        )
