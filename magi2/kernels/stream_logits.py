"""Norm of the streams and their product with phi in one pass, which may also make the streams.

The norm's scale belongs to a whole row, so it can wait until the row has been read:

    logits = rsqrt(mean(x**2) + eps) * (x @ ((1 + weight) * phi))

A program owns BLOCK_T tokens of one modality and CHANNELS channels of all four streams. It stores
what they add to the 24 products and, in column 24, to the sum of squares; `stream_maps_kernel`
adds the parts in ascending order and scales. A row's bits depend on neither its block nor the
number of tokens. The normalised streams exist nowhere.

Accuracy is that of float32: bfloat16 streams meet the three bfloat16 parts of a float32 matrix
(see `split_product`), others a float32 product that is not narrowed to TF32.
"""

import triton
import triton.language as tl

from magi2.kernels.expert_blocks import multiply, narrow, split_product, widen
from magi2.kernels.stream_mix import load_streams, weigh


@triton.jit
def _accumulate(
    value, total, squares, stream, weight, phi, column, inside, number,
    C: tl.constexpr, N: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Add one stream's tile, in its own dtype, to the products and the squares."""
    row = stream * C + column
    scale = 1.0 + tl.load(weight + row, mask=inside, other=0.0)
    matrix = tl.load(
        phi + row[:, None] * N + number[None, :],
        mask=inside[:, None] & (number < N)[None, :],
        other=0.0,
    )
    matrix = scale[:, None] * matrix
    wide = widen(value, INTERPRETED)
    squares += wide * wide
    if value.dtype == tl.bfloat16:
        total = split_product(value, matrix, total, INTERPRETED)
    else:
        total = multiply(wide, matrix, total, INTERPRETED)
    return total, squares


@triton.jit
def _store_mixed(
    address, w0, w1, w2, w3, w, x0, x1, x2, x3, branch, mask, INTERPRETED: tl.constexpr
):
    """Make and store a tile of one of the next streams; weights are one a row."""
    mixed = weigh(w0[:, None], w1[:, None], w2[:, None], w3[:, None], x0, x1, x2, x3)
    mixed = mixed + w[:, None] * branch
    tl.store(address, narrow(mixed, address.dtype.element_ty, INTERPRETED), mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "size_0", "size_1", "size_2"])
def stream_logits_kernel(
    x,
    y,
    post,
    res,
    out,
    weight,
    phi,
    parts,
    num_tokens,
    size_0,
    size_1,
    size_2,
    token_stride,
    branch_stride,
    C: tl.constexpr,
    N: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CONNECT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Parts [., N + 1, num_tokens] of the logits of x [num_tokens, 4, C].

    weight is [groups, 4 * C] and phi [4 * C, N]; size_0, size_1 and size_2 are the tokens of the
    groups, in order. With CONNECT the streams are first made as `hyper_connect_kernel` makes them,
    stored to out, and these are projected.
    """
    block = tl.program_id(0)
    blocks_0 = tl.cdiv(size_0, BLOCK_T)
    blocks_01 = blocks_0 + tl.cdiv(size_1, BLOCK_T)
    group = (block >= blocks_0).to(tl.int32) + (block >= blocks_01).to(tl.int32)
    first = tl.where(group == 0, 0, tl.where(group == 1, size_0, size_0 + size_1))
    end = first + tl.where(group == 0, size_0, tl.where(group == 1, size_1, size_2))
    block -= tl.where(group == 0, 0, tl.where(group == 1, blocks_0, blocks_01))
    token = first + block * BLOCK_T + tl.arange(0, BLOCK_T)
    live = token < end
    weight += group * (4 * C)
    number = tl.arange(0, BLOCK_N)
    # int64: token * stride passes 2**31 elements long before memory is full.
    tall = token.to(tl.int64)[:, None]
    total = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    first_column = tl.program_id(1) * CHANNELS
    if CONNECT:
        a0, a1, a2, a3 = load_streams(res + token.to(tl.int64) * 16, 1, live, INTERPRETED)
        b0, b1, b2, b3 = load_streams(res + token.to(tl.int64) * 16 + 4, 1, live, INTERPRETED)
        c0, c1, c2, c3 = load_streams(res + token.to(tl.int64) * 16 + 8, 1, live, INTERPRETED)
        d0, d1, d2, d3 = load_streams(res + token.to(tl.int64) * 16 + 12, 1, live, INTERPRETED)
        p0, p1, p2, p3 = load_streams(post + token.to(tl.int64) * 4, 1, live, INTERPRETED)
        for step in range(0, CHANNELS, BLOCK_K):
            column = first_column + step + tl.arange(0, BLOCK_K)
            inside = column < C
            mask = live[:, None] & inside[None, :]
            address = x + tall * token_stride + column[None, :]
            x0, x1, x2, x3 = load_streams(address, C, mask, INTERPRETED)
            address = y + tall * branch_stride + column[None, :]
            branch = widen(tl.load(address, mask=mask, other=0.0), INTERPRETED)
            address = out + tall * (4 * C) + column[None, :]
            _store_mixed(address, a0, a1, a2, a3, p0, x0, x1, x2, x3, branch, mask, INTERPRETED)
            _store_mixed(address + C, b0, b1, b2, b3, p1, x0, x1, x2, x3, branch, mask, INTERPRETED)
            _store_mixed(
                address + 2 * C, c0, c1, c2, c3, p2, x0, x1, x2, x3, branch, mask, INTERPRETED
            )
            _store_mixed(
                address + 3 * C, d0, d1, d2, d3, p3, x0, x1, x2, x3, branch, mask, INTERPRETED
            )
            # Read again from the cache they were just written to, in the order that the product
            # wants: as values the compiler would make them twice, in both orders, and spill.
            tl.debug_barrier()
            for stream in tl.static_range(4):
                total, squares = _accumulate(
                    tl.load(address + stream * C, mask=mask, other=0.0), total, squares, stream,
                    weight, phi, column, inside, number, C, N, INTERPRETED,
                )  # fmt: skip
    else:
        # Streams inside a step, as above: the same order of sums, in one loop to be pipelined.
        for index in range(0, 4 * (CHANNELS // BLOCK_K)):
            stream = index % 4
            column = first_column + (index // 4) * BLOCK_K + tl.arange(0, BLOCK_K)
            inside = column < C
            mask = live[:, None] & inside[None, :]
            address = x + tall * token_stride + stream * C + column[None, :]
            total, squares = _accumulate(
                tl.load(address, mask=mask, other=0.0), total, squares, stream,
                weight, phi, column, inside, number, C, N, INTERPRETED,
            )  # fmt: skip
    base = parts + tl.program_id(1).to(tl.int64) * (N + 1) * num_tokens
    address = base + number[None, :].to(tl.int64) * num_tokens + tall
    tl.store(address, total, mask=live[:, None] & (number < N)[None, :])
    tl.store(base + N * num_tokens.to(tl.int64) + token, tl.sum(squares, 1), mask=live)
