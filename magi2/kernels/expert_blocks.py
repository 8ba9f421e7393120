"""What the expert kernels share: rows, weights, one product step, the activation, the store.

`INTERPRETED` is set under Triton's interpreter, whose bfloat16 products are wrong and whose
conversions cut off and miss zeros: there operands are widened first, and both are spelled out.
"""

import triton
import triton.language as tl


@triton.jit
def narrow(value, DTYPE: tl.constexpr, INTERPRETED: tl.constexpr):
    """The nearest DTYPE of a float32 tile, ties to even."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        bits = value.to(tl.int32, bitcast=True)
        # A NaN has no neighbours: its upper half is one too, as long as its quiet bit is set.
        bits = tl.where(value == value, bits + 0x7FFF + ((bits >> 16) & 1), bits | 0x400000)
        result = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        result = value.to(DTYPE)
    return result


@triton.jit
def widen(value, INTERPRETED: tl.constexpr):
    """The same numbers in float32."""
    if INTERPRETED and value.dtype == tl.bfloat16:
        bits = value.to(tl.int16, bitcast=True).to(tl.int32) << 16
        result = bits.to(tl.float32, bitcast=True)
    else:
        result = value.to(tl.float32)
    return result


@triton.jit
def load_weight(
    weight,
    expert,
    row,
    column,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
):
    """Tile at (row, column) of an expert's matrix [ROWS, COLUMNS], zeros beyond its edges."""
    if DESCRIPTORS:
        tile = weight.load([expert, row, column]).reshape(BLOCK_R, BLOCK_C)
    else:
        rows = row + tl.arange(0, BLOCK_R)
        columns = column + tl.arange(0, BLOCK_C)
        # int64: expert * matrix passes 2**31 with 6554 experts of 256 x 1280.
        matrix = weight + expert.to(tl.int64) * (ROWS * COLUMNS)
        address = matrix + rows[:, None] * COLUMNS + columns[None, :]
        if ROWS % BLOCK_R == 0 and COLUMNS % BLOCK_C == 0:
            tile = tl.load(address)
        else:
            inside = (rows[:, None] < ROWS) & (columns[None, :] < COLUMNS)
            tile = tl.load(address, mask=inside, other=0.0)
    return tile


@triton.jit
def load_rows(address, column, COLUMNS: tl.constexpr, BLOCK_C: tl.constexpr):
    """Columns from `column` on of the rows that start at the addresses, zeros beyond the edge."""
    columns = column + tl.arange(0, BLOCK_C)
    if COLUMNS % BLOCK_C == 0:
        tile = tl.load(address[:, None] + columns[None, :])
    else:
        tile = tl.load(
            address[:, None] + columns[None, :], mask=columns[None, :] < COLUMNS, other=0.0
        )
    return tile


@triton.jit
def multiply(a, b, accumulator, INTERPRETED: tl.constexpr):
    """`accumulator + a @ b` in float32; float32 operands are not narrowed to TF32."""
    if INTERPRETED:
        a = widen(a, INTERPRETED)
        b = widen(b, INTERPRETED)
    return tl.dot(a, b, accumulator, input_precision="ieee")


@triton.jit
def split_in_three(matrix, INTERPRETED: tl.constexpr):
    """bfloat16 tiles whose exact sum is a float32 one, the largest first."""
    hi = narrow(matrix, tl.bfloat16, INTERPRETED)
    rest = matrix - widen(hi, INTERPRETED)
    mid = narrow(rest, tl.bfloat16, INTERPRETED)
    lo = narrow(rest - widen(mid, INTERPRETED), tl.bfloat16, INTERPRETED)
    return hi, mid, lo


@triton.jit
def split_product(x, matrix, total, INTERPRETED: tl.constexpr):
    """`total + x @ matrix` with bfloat16 x and float32 matrix, smallest parts first.

    A float32 number is the exact sum of three bfloat16 ones, so all products are exact.
    """
    hi, mid, lo = split_in_three(matrix, INTERPRETED)
    total = multiply(x, lo, total, INTERPRETED)
    total = multiply(x, mid, total, INTERPRETED)
    return multiply(x, hi, total, INTERPRETED)


@triton.jit
def activate(gate, up):
    """swiglu7 of float32 tiles. Selections rather than minima: a NaN stays one."""
    gate = tl.where(gate > 7.0, 7.0, gate)
    up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
    return gate * tl.sigmoid(1.702 * gate) * (up + 1.0)


@triton.jit
def x_rows(
    x, route, num_routes, token_stride, head_stride, HEADS: tl.constexpr, TOP_K: tl.constexpr
):
    """Addresses of the input rows; an empty slot reads the first row, and its result is dropped."""
    row = tl.where(route < num_routes, route, 0) // TOP_K
    # int64: token * stride passes 2**31 elements long before memory is full.
    token = (row // HEADS).to(tl.int64)
    head = (row % HEADS).to(tl.int64)
    return x + token * token_stride + head * head_stride


@triton.jit
def store_weighted(
    out, total, weights, route, num_routes, columns, D: tl.constexpr, INTERPRETED: tl.constexpr
):
    """`out[route] = total * weights[route]`, rounded once; empty slots store nothing."""
    live = route < num_routes
    weight = tl.load(weights + route, mask=live, other=0.0)
    address = out + route.to(tl.int64)[:, None] * D + columns[None, :]
    weighted = narrow(total * weight[:, None], out.dtype.element_ty, INTERPRETED)
    tl.store(address, weighted, mask=live[:, None] & (columns < D)[None, :])
