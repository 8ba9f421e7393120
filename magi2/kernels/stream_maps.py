"""Logits to the maps of one branch: affine, sigmoids, and Sinkhorn iterations in registers.

A thread owns a token: its 4 x 4 matrix is 16 tensors of BLOCK_T numbers, so every sum is written
out and no reduction chooses an order. Nothing is stored between iterations.

What the bits are, and how each is pinned:

* Sums are left folds, `((m0 + m1) + m2) + m3`, then `+ eps`: the bits of torch on a CPU, eager or
  compiled with the sizes known. INTERLEAVED row sums are `(m0 + m2) + (m1 + m3)` instead, the
  order of torch's eager reduction of 4 adjacent numbers on CUDA; its column sums are left folds.
* Divisions are IEEE ones, `tl.div_rn`: a plain `/` is off by a unit in the last place on a GPU.
  (Triton 3.2 flushes subnormal quotients to zero; 3.6 does not.)
* Launches turn `enable_fp_fusion` off: a multiplication and an addition stay two roundings, as
  eager torch has them in `alpha * scale * logit + bias`. No other product meets a sum here.
* The exponential is the device library's own, which eager torch calls too; `tl.exp` would be the
  approximate one. Triton links it with results below 2**-126 flushed to zero, eager torch does
  not: a logit 87.3 below its matrix's maximum differs. Under the interpreter it is numpy's. Of all
  steps it alone is not the same everywhere: iterations of given weights (`EXPONENTIATE` off) are.
* The maximum keeps a NaN, wherever it stands, and NaN or infinity reach all of a token's matrix
  and nothing of another token.
* Sigmoid is `1 / (1 + exp(-z))` of the same parts, as in eager torch on CUDA; doubling is exact.
* Results are rounded once, to nearest even, to what is stored.

An operator has one form, so it gives the same bits called eagerly and from a static or a dynamic
graph. `fast` divisions (FAST) share one reciprocal among the numbers with the same divisor and
correct each quotient twice with fused multiply-adds, as the device's own division does, without its
branch. Both are correctly rounded, so the bits are the same, as long as no quotient nears the
subnormal numbers; a program that meets numbers below 2**-60 or above 1, infinities or NaN runs
again with `tl.div_rn`.
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from magi2.kernels.expert_blocks import narrow

_SMALL = tl.constexpr(2.0**-60)


@triton.jit
def _exp(x, INTERPRETED: tl.constexpr):
    if INTERPRETED:  # noqa: SIM108 - of a conditional expression both sides are compiled
        result = tl.exp(x)
    else:
        result = libdevice.exp(x)
    return result


@triton.jit
def _sigmoid(z, INTERPRETED: tl.constexpr):
    return tl.div_rn(1.0, 1.0 + _exp(-z, INTERPRETED))


@triton.jit
def _larger(a, b):
    """The maximum, NaN if either is."""
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def _larger4(a, b, c, d):
    return _larger(_larger(a, b), _larger(c, d))


@triton.jit
def _smaller4(a, b, c, d):
    return tl.minimum(tl.minimum(a, b), tl.minimum(c, d))


@triton.jit
def _sum4(a, b, c, d, INTERLEAVED: tl.constexpr):
    if INTERLEAVED:  # noqa: SIM108 - parentheses that order sums are easier to see here
        total = (a + c) + (b + d)
    else:
        total = ((a + b) + c) + d
    return total


@triton.jit
def _quotient(x, divisor, inverse):
    """`x / divisor` correctly rounded, from a reciprocal that is off by a unit at most."""
    q = x * inverse
    q = tl.fma(tl.fma(-divisor, q, x), inverse, q)
    return tl.fma(tl.fma(-divisor, q, x), inverse, q)


@triton.jit
def _normalise4(a, b, c, d, EPS: tl.constexpr, INTERLEAVED: tl.constexpr, FAST: tl.constexpr):
    """Four numbers over their sum."""
    total = _sum4(a, b, c, d, INTERLEAVED) + EPS
    if FAST:
        inverse = 1.0 / total
        inverse = tl.fma(tl.fma(-total, inverse, 1.0), inverse, inverse)
        a = _quotient(a, total, inverse)
        b = _quotient(b, total, inverse)
        c = _quotient(c, total, inverse)
        d = _quotient(d, total, inverse)
    else:
        a = tl.div_rn(a, total)
        b = tl.div_rn(b, total)
        c = tl.div_rn(c, total)
        d = tl.div_rn(d, total)
    return a, b, c, d


@triton.jit
def _load4(address, stride, live, other):
    a = tl.load(address, mask=live, other=other)
    b = tl.load(address + stride, mask=live, other=other)
    c = tl.load(address + 2 * stride, mask=live, other=other)
    d = tl.load(address + 3 * stride, mask=live, other=other)
    return a, b, c, d


@triton.jit
def _store4(address, a, b, c, d, live, INTERPRETED: tl.constexpr):
    dtype: tl.constexpr = address.dtype.element_ty
    tl.store(address, narrow(a, dtype, INTERPRETED), mask=live)
    tl.store(address + 1, narrow(b, dtype, INTERPRETED), mask=live)
    tl.store(address + 2, narrow(c, dtype, INTERPRETED), mask=live)
    tl.store(address + 3, narrow(d, dtype, INTERPRETED), mask=live)


@triton.jit
def _iterate(
    a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3,
    ITERATIONS: tl.constexpr, EPS: tl.constexpr, INTERLEAVED: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Column step, row step, ITERATIONS times; and the smallest number that was met, if FAST."""
    least = a0 * 0.0 + 1.0
    if FAST:
        # Numbers in [least, 1]: sums are at most 4, and a column step gives at least least / 4.
        least = tl.minimum(
            tl.minimum(_smaller4(a0, a1, a2, a3), _smaller4(b0, b1, b2, b3)),
            tl.minimum(_smaller4(c0, c1, c2, c3), _smaller4(d0, d1, d2, d3)),
        )
        top = _larger(
            _larger(_larger4(a0, a1, a2, a3), _larger4(b0, b1, b2, b3)),
            _larger(_larger4(c0, c1, c2, c3), _larger4(d0, d1, d2, d3)),
        )
        least = tl.where(top <= 1.0, least, 0.0)  # NaN is not at most 1
    for _ in range(ITERATIONS):
        a0, b0, c0, d0 = _normalise4(a0, b0, c0, d0, EPS, False, FAST)
        a1, b1, c1, d1 = _normalise4(a1, b1, c1, d1, EPS, False, FAST)
        a2, b2, c2, d2 = _normalise4(a2, b2, c2, d2, EPS, False, FAST)
        a3, b3, c3, d3 = _normalise4(a3, b3, c3, d3, EPS, False, FAST)
        a0, a1, a2, a3 = _normalise4(a0, a1, a2, a3, EPS, INTERLEAVED, FAST)
        b0, b1, b2, b3 = _normalise4(b0, b1, b2, b3, EPS, INTERLEAVED, FAST)
        c0, c1, c2, c3 = _normalise4(c0, c1, c2, c3, EPS, INTERLEAVED, FAST)
        d0, d1, d2, d3 = _normalise4(d0, d1, d2, d3, EPS, INTERLEAVED, FAST)
        if FAST:
            rows = tl.minimum(_smaller4(a0, a1, a2, a3), _smaller4(b0, b1, b2, b3))
            others = tl.minimum(_smaller4(c0, c1, c2, c3), _smaller4(d0, d1, d2, d3))
            least = tl.minimum(least, tl.minimum(rows, others))
    return a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3, least


@triton.jit
def _sinkhorn(
    out, live,
    a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3,
    ITERATIONS: tl.constexpr, EPS: tl.constexpr, EXPONENTIATE: tl.constexpr,
    INTERLEAVED: tl.constexpr, FAST: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Store the doubly stochastic matrices of rows a, b, c and d at `out`, 16 numbers a token."""
    if EXPONENTIATE:
        top = _larger(
            _larger(_larger4(a0, a1, a2, a3), _larger4(b0, b1, b2, b3)),
            _larger(_larger4(c0, c1, c2, c3), _larger4(d0, d1, d2, d3)),
        )
        a0, a1, a2, a3 = _exp4(a0, a1, a2, a3, top, INTERPRETED)
        b0, b1, b2, b3 = _exp4(b0, b1, b2, b3, top, INTERPRETED)
        c0, c1, c2, c3 = _exp4(c0, c1, c2, c3, top, INTERPRETED)
        d0, d1, d2, d3 = _exp4(d0, d1, d2, d3, top, INTERPRETED)
    if FAST:
        e0, e1, e2, e3, f0, f1, f2, f3, g0, g1, g2, g3, h0, h1, h2, h3, least = _iterate(
            a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3,
            ITERATIONS, EPS, INTERLEAVED, True,
        )  # fmt: skip
        fine = tl.min((least >= _SMALL).to(tl.int32), 0)
        if fine == 0:
            e0, e1, e2, e3, f0, f1, f2, f3, g0, g1, g2, g3, h0, h1, h2, h3, least = _iterate(
                a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3,
                ITERATIONS, EPS, INTERLEAVED, False,
            )  # fmt: skip
    else:
        e0, e1, e2, e3, f0, f1, f2, f3, g0, g1, g2, g3, h0, h1, h2, h3, least = _iterate(
            a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3,
            ITERATIONS, EPS, INTERLEAVED, False,
        )  # fmt: skip
    _store4(out, e0, e1, e2, e3, live, INTERPRETED)
    _store4(out + 4, f0, f1, f2, f3, live, INTERPRETED)
    _store4(out + 8, g0, g1, g2, g3, live, INTERPRETED)
    _store4(out + 12, h0, h1, h2, h3, live, INTERPRETED)


@triton.jit
def _exp4(a, b, c, d, top, INTERPRETED: tl.constexpr):
    a = _exp(a - top, INTERPRETED)
    b = _exp(b - top, INTERPRETED)
    c = _exp(c - top, INTERPRETED)
    d = _exp(d - top, INTERPRETED)
    return a, b, c, d


@triton.jit(do_not_specialize=["num_tokens"])
def sinkhorn_kernel(
    weights,
    out,
    num_tokens,
    token_stride,
    row_stride,
    column_stride,
    ITERATIONS: tl.constexpr,
    EPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    EXPONENTIATE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FAST: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Float32 [num_tokens, 4, 4], logits or already their exponentials, to out [num_tokens, 16]."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = token < num_tokens
    # int64: token * stride passes 2**31 elements long before memory is full.
    row = weights + token.to(tl.int64) * token_stride
    # Masked lanes hold ones: nothing there divides by zero, or is small.
    a0, a1, a2, a3 = _load4(row, column_stride, live, 1.0)
    b0, b1, b2, b3 = _load4(row + row_stride, column_stride, live, 1.0)
    c0, c1, c2, c3 = _load4(row + 2 * row_stride, column_stride, live, 1.0)
    d0, d1, d2, d3 = _load4(row + 3 * row_stride, column_stride, live, 1.0)
    _sinkhorn(
        out + token.to(tl.int64) * 16, live,
        a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3,
        ITERATIONS, EPS, EXPONENTIATE, INTERLEAVED, FAST, INTERPRETED,
    )  # fmt: skip


@triton.jit
def _total(address, part_stride, live, PARTS: tl.constexpr):
    """Sum of what the parts of the projection stored, in their order."""
    total = tl.load(address, mask=live, other=1.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(address + part * part_stride, mask=live, other=1.0)
    return total


@triton.jit
def _affine4(logits, column_stride, part_stride, factor, alpha, bias, live, PARTS: tl.constexpr):
    """`alpha * logit + bias` of four columns, two roundings each."""
    a = alpha * (_total(logits, part_stride, live, PARTS) * factor) + tl.load(bias)
    logits += column_stride
    b = alpha * (_total(logits, part_stride, live, PARTS) * factor) + tl.load(bias + 1)
    logits += column_stride
    c = alpha * (_total(logits, part_stride, live, PARTS) * factor) + tl.load(bias + 2)
    logits += column_stride
    d = alpha * (_total(logits, part_stride, live, PARTS) * factor) + tl.load(bias + 3)
    return a, b, c, d


@triton.jit(do_not_specialize=["num_tokens"])
def stream_maps_kernel(
    logits,
    alpha_pre,
    alpha_post,
    alpha_res,
    bias_pre,
    bias_post,
    bias_res,
    pre,
    post,
    res,
    num_tokens,
    token_stride,
    column_stride,
    part_stride,
    scale,
    ITERATIONS: tl.constexpr,
    WIDTH: tl.constexpr,
    NORM_EPS: tl.constexpr,
    EPS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FAST: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Maps pre [num_tokens, 4], post [num_tokens, 4] and res [num_tokens, 16] of 24 logits each.

    With PARTS above 0 the logits are sums of that many parts that still miss the norm: column 24
    holds sums of squares, of WIDTH numbers in all.
    """
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = token < num_tokens
    row = logits + token.to(tl.int64) * token_stride
    factor = 1.0
    if PARTS > 0:
        squares = _total(row + 24 * column_stride, part_stride, live, PARTS)
        factor = tl.rsqrt(tl.div_rn(squares, WIDTH * 1.0) + NORM_EPS)
    place = token.to(tl.int64) * 4
    alpha = tl.load(alpha_pre) * scale
    a0, a1, a2, a3 = _affine4(row, column_stride, part_stride, factor, alpha, bias_pre, live, PARTS)
    _store4(
        pre + place,
        _sigmoid(a0, INTERPRETED),
        _sigmoid(a1, INTERPRETED),
        _sigmoid(a2, INTERPRETED),
        _sigmoid(a3, INTERPRETED),
        live,
        INTERPRETED,
    )
    alpha = tl.load(alpha_post) * scale
    row += 4 * column_stride
    a0, a1, a2, a3 = _affine4(
        row, column_stride, part_stride, factor, alpha, bias_post, live, PARTS
    )
    _store4(
        post + place,
        2.0 * _sigmoid(a0, INTERPRETED),
        2.0 * _sigmoid(a1, INTERPRETED),
        2.0 * _sigmoid(a2, INTERPRETED),
        2.0 * _sigmoid(a3, INTERPRETED),
        live,
        INTERPRETED,
    )
    alpha = tl.load(alpha_res) * scale
    row += 4 * column_stride
    a0, a1, a2, a3 = _affine4(row, column_stride, part_stride, factor, alpha, bias_res, live, PARTS)
    row += 4 * column_stride
    b0, b1, b2, b3 = _affine4(
        row, column_stride, part_stride, factor, alpha, bias_res + 4, live, PARTS
    )
    row += 4 * column_stride
    c0, c1, c2, c3 = _affine4(
        row, column_stride, part_stride, factor, alpha, bias_res + 8, live, PARTS
    )
    row += 4 * column_stride
    d0, d1, d2, d3 = _affine4(
        row, column_stride, part_stride, factor, alpha, bias_res + 12, live, PARTS
    )
    _sinkhorn(
        res + place * 4, live,
        a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3,
        ITERATIONS, EPS, True, INTERLEAVED, FAST, INTERPRETED,
    )  # fmt: skip
