"""Norm of the streams and their product with phi in one pass.

The norm's scale belongs to a whole row, so it can wait until the row has been read:

    logits = rsqrt(mean(x**2) + eps) * (x @ ((1 + weight) * phi))

A program owns BLOCK_T tokens of one modality and CHANNELS channels of all four streams. It stores
what they add to the 24 products and, in column 24, to the sum of squares; `stream_maps_kernel`
adds the parts in ascending order and scales. A row's bits depend on neither its block nor the
number of tokens. The normalised streams exist nowhere.

Accuracy is that of float32: bfloat16 streams meet the three bfloat16 parts of a float32 matrix
(see `split_matrix_kernel`), others a float32 product that is not narrowed to TF32.
"""

import triton
import triton.language as tl

from magi2.kernels.expert_blocks import multiply, split_in_three, widen


@triton.jit
def _scaled(weight, phi, row, inside, number, N: tl.constexpr):
    """Rows of (1 + weight) * phi in float32, zeros outside."""
    scale = 1.0 + tl.load(weight + row, mask=inside, other=0.0)
    matrix = tl.load(
        phi + row[:, None] * N + number[None, :],
        mask=inside[:, None] & (number < N)[None, :],
        other=0.0,
    )
    return scale[:, None] * matrix


@triton.jit
def split_matrix_kernel(
    weight,
    phi,
    split,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """The scaled matrix of each group as three bfloat16 ones, [groups, 3, ROWS, BLOCK_N].

    Large parts first; their sum is the float32 matrix, columns from N on are zero. Made once so
    that the product can fetch them ahead instead of waiting for each tile of the float32 one.
    """
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    group = tl.program_id(1)
    number = tl.arange(0, BLOCK_N)
    inside = row < ROWS
    hi, mid, lo = split_in_three(
        _scaled(weight + group * ROWS, phi, row, inside, number, N), INTERPRETED
    )
    address = split + (group * (3 * ROWS) + row)[:, None] * BLOCK_N + number[None, :]
    tl.store(address, hi, mask=inside[:, None])
    tl.store(address + ROWS * BLOCK_N, mid, mask=inside[:, None])
    tl.store(address + 2 * ROWS * BLOCK_N, lo, mask=inside[:, None])


@triton.jit
def _product(
    value, weight, phi, split, row, inside, number,
    C: tl.constexpr, N: tl.constexpr, BLOCK_N: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Products of a tile of one stream, in its own dtype, with the rows that it meets."""
    total = tl.zeros((value.shape[0], BLOCK_N), tl.float32)
    if value.dtype == tl.bfloat16:
        address = split + row[:, None] * BLOCK_N + number[None, :]
        part: tl.constexpr = 4 * C * BLOCK_N
        mask = inside[:, None]
        lo = tl.load(address + 2 * part, mask=mask, other=0.0)
        total = multiply(value, lo, total, INTERPRETED)
        total = multiply(value, tl.load(address + part, mask=mask, other=0.0), total, INTERPRETED)
        total = multiply(value, tl.load(address, mask=mask, other=0.0), total, INTERPRETED)
    else:
        matrix = _scaled(weight, phi, row, inside, number, N)
        total = multiply(widen(value, INTERPRETED), matrix, total, INTERPRETED)
    return total


@triton.jit(do_not_specialize=["num_tokens", "size_0", "size_1", "size_2"])
def stream_logits_kernel(
    x,
    weight,
    phi,
    split,
    parts,
    num_tokens,
    size_0,
    size_1,
    size_2,
    token_stride,
    C: tl.constexpr,
    N: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Parts [., N + 1, num_tokens] of the logits of x [num_tokens, 4, C].

    weight is [groups, 4 * C] and phi [4 * C, N]; for bfloat16 streams they are not read, but what
    `split_matrix_kernel` made of them. size_0, size_1 and size_2 are the tokens of the groups, in
    order.
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
    split += group * (3 * 4 * C * BLOCK_N)
    number = tl.arange(0, BLOCK_N)
    # int64: token * stride passes 2**31 elements long before memory is full.
    tall = token.to(tl.int64)[:, None]
    total = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    squares = tl.zeros((BLOCK_T, BLOCK_K), tl.float32)
    first_column = tl.program_id(1) * CHANNELS
    # Streams inside a step, in one loop to be pipelined.
    for index in range(0, 4 * (CHANNELS // BLOCK_K)):
        stream = index % 4
        column = first_column + (index // 4) * BLOCK_K + tl.arange(0, BLOCK_K)
        inside = column < C
        mask = live[:, None] & inside[None, :]
        address = x + tall * token_stride + stream * C + column[None, :]
        value = tl.load(address, mask=mask, other=0.0)
        wide = widen(value, INTERPRETED)
        squares += wide * wide
        # A sum of its own for each step: matrix units cut off what they add to a sum, and over all
        # the channels that adds up to ten times the error of float32 additions.
        row = stream * C + column
        total += _product(
            value, weight, phi, split, row, inside, number, C, N, BLOCK_N, INTERPRETED
        )
    base = parts + tl.program_id(1).to(tl.int64) * (N + 1) * num_tokens
    address = base + number[None, :].to(tl.int64) * num_tokens + tall
    tl.store(address, total, mask=live[:, None] & (number < N)[None, :])
    tl.store(base + N * num_tokens.to(tl.int64) + token, tl.sum(squares, 1), mask=live)
