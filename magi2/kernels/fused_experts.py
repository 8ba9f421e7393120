"""The whole gated MLP of a block of routes in one program; its hidden row never leaves the chip.

A program holds its block's rows [BLOCK_M, D] and the float32 result [BLOCK_M, D], walks over the
inner channels in tiles of BLOCK_F, and for each multiplies by a tile of W_gate and W_up, activates,
rounds, and multiplies by the matching tile of W_down. Sums run over ascending tiles in one
accumulator: deterministic, and independent of where a row lies.
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
def _expert_block(
    block,
    x,
    w_gate,
    w_up,
    w_down,
    out,
    weights,
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
    BLOCK_D: tl.constexpr,
    BLOCK_F: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    expert = tl.load(block_expert + block)
    route = tl.load(slots + block * BLOCK_M + tl.arange(0, BLOCK_M))
    rows = x_rows(x, route, num_routes, token_stride, head_stride, HEADS, TOP_K)
    a = load_rows(rows, 0, D, BLOCK_D)
    total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for f in range(0, F, BLOCK_F):
        zeros = tl.zeros((BLOCK_M, BLOCK_F), tl.float32)
        b = load_weight(w_gate, expert, 0, f, D, F, BLOCK_D, BLOCK_F, DESCRIPTORS)
        gate = multiply(a, b, zeros, INTERPRETED)
        b = load_weight(w_up, expert, 0, f, D, F, BLOCK_D, BLOCK_F, DESCRIPTORS)
        up = multiply(a, b, zeros, INTERPRETED)
        b = load_weight(w_down, expert, f, 0, F, D, BLOCK_F, BLOCK_D, DESCRIPTORS)
        total = multiply(narrow(activate(gate, up), a.dtype, INTERPRETED), b, total, INTERPRETED)
    store_weighted(out, total, weights, route, num_routes, tl.arange(0, BLOCK_D), D, INTERPRETED)


@triton.jit(do_not_specialize=["num_routes"])
def fused_experts_kernel(
    x,
    w_gate,
    w_up,
    w_down,
    out,
    weights,
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
    BLOCK_D: tl.constexpr,
    BLOCK_F: tl.constexpr,
    PERSISTENT: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """`out[r] = swiglu7(x @ w_gate, x @ w_up) @ w_down * weights[r]` with x row `r // TOP_K`.

    x is strided (tokens, heads, D); w_gate and w_up are [experts, D, F], w_down [experts, F, D], as
    descriptors of blocks [1, BLOCK_D, BLOCK_F] and [1, BLOCK_F, BLOCK_D] where DESCRIPTORS; weights
    [routes] float32, out [routes, D]. BLOCK_D is the power of two from D on.
    """
    num_blocks = tl.load(padded_total) // BLOCK_M
    first = tl.program_id(0)
    if PERSISTENT:
        block = first
        while block < num_blocks:
            _expert_block(
                block,
                x,
                w_gate,
                w_up,
                w_down,
                out,
                weights,
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
                BLOCK_D,
                BLOCK_F,
                DESCRIPTORS,
                INTERPRETED,
            )
            block += tl.num_programs(0)
    elif first < num_blocks:
        _expert_block(
            first,
            x,
            w_gate,
            w_up,
            w_down,
            out,
            weights,
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
            BLOCK_D,
            BLOCK_F,
            DESCRIPTORS,
            INTERPRETED,
        )
