"""Four residual streams to a branch's input, and the branch's output back to the streams.

Both are one pass over what they read. The order of additions is the one of `mix_streams_torch` and
`hyper_connect_torch`: streams in ascending order, the branch's term last, each product and each sum
a float32 rounding of its own (launches turn `enable_fp_fusion` off), and one rounding to the
streams' dtype. So the bits are those of torch, on a CPU and on a GPU.
"""

import triton
import triton.language as tl

from magi2.kernels.expert_blocks import narrow, widen


@triton.jit
def load_streams(address, stride, inside, INTERPRETED: tl.constexpr):
    """The four streams of a tile in float32; weights of the four in the same way."""
    x0 = widen(tl.load(address, mask=inside, other=0.0), INTERPRETED)
    x1 = widen(tl.load(address + stride, mask=inside, other=0.0), INTERPRETED)
    x2 = widen(tl.load(address + 2 * stride, mask=inside, other=0.0), INTERPRETED)
    x3 = widen(tl.load(address + 3 * stride, mask=inside, other=0.0), INTERPRETED)
    return x0, x1, x2, x3


@triton.jit
def weigh(w0, w1, w2, w3, x0, x1, x2, x3):
    """Left fold of the weighted streams."""
    return ((w0 * x0 + w1 * x1) + w2 * x2) + w3 * x3


@triton.jit(do_not_specialize=["num_tokens"])
def mix_streams_kernel(
    x,
    pre,
    out,
    num_tokens,
    token_stride,
    C: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Streams [num_tokens, 4, C] with weights [num_tokens, 4] to out [num_tokens, C]."""
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    for i in tl.static_range(TOKENS):
        # int64: token * stride passes 2**31 elements long before memory is full.
        token = tl.program_id(0).to(tl.int64) * TOKENS + i
        live = token < num_tokens
        inside = live & (column < C)
        x0, x1, x2, x3 = load_streams(x + token * token_stride + column, C, inside, INTERPRETED)
        w0, w1, w2, w3 = load_streams(pre + token * 4, 1, live, INTERPRETED)
        total = weigh(w0, w1, w2, w3, x0, x1, x2, x3)
        total = narrow(total, out.dtype.element_ty, INTERPRETED)
        tl.store(out + token * C + column, total, mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def hyper_connect_kernel(
    x,
    y,
    post,
    res,
    out,
    num_tokens,
    token_stride,
    branch_stride,
    C: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Next streams [num_tokens, 4, C] of x, y [num_tokens, C], post [., 4] and res [., 4, 4].

    One token at a time, so that its weights are scalars: as a tile's column every thread would
    load each of them once for every channel it owns.
    """
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    for i in tl.static_range(TOKENS):
        token = tl.program_id(0).to(tl.int64) * TOKENS + i
        live = token < num_tokens
        inside = live & (column < C)
        x0, x1, x2, x3 = load_streams(x + token * token_stride + column, C, inside, INTERPRETED)
        branch = tl.load(y + token * branch_stride + column, mask=inside, other=0.0)
        branch = widen(branch, INTERPRETED)
        for stream in tl.static_range(4):
            w0, w1, w2, w3 = load_streams(res + token * 16 + 4 * stream, 1, live, INTERPRETED)
            w = widen(tl.load(post + token * 4 + stream, mask=live, other=0.0), INTERPRETED)
            total = weigh(w0, w1, w2, w3, x0, x1, x2, x3) + w * branch
            total = narrow(total, out.dtype.element_ty, INTERPRETED)
            tl.store(out + token * (4 * C) + stream * C + column, total, mask=inside)
