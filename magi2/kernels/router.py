"""Expert choice in one launch: product with the router rows, scores, top k, weights.

A program owns BLOCK_T tokens of one head and all experts of that head, so logits and scores stay in
registers. It reads x [tokens, heads, D] as it lies and writes [tokens, heads, top_k].

The product is a float32 one on bfloat16 matrix units: x is bfloat16 already, and a float32 router
row is the exact sum of three bfloat16 ones,

    g = hi + mid + lo,    hi = bf16(g),  mid = bf16(g - hi),  lo = bf16(g - hi - mid)

(8 significant bits each, 24 in all), so x @ g = x @ lo + x @ mid + x @ hi with exact products and
float32 sums. That costs three times a bfloat16 product, an eighth of a float32 one.

The order among the experts is that of `router_choice.py`.
"""

import triton
import triton.language as tl

from magi2.kernels.expert_blocks import multiply, split_product
from magi2.kernels.router_choice import TAKEN, order_key, take_best


@triton.jit
def _product(
    x,
    gate,
    token,
    num_tokens,
    head,
    token_stride,
    head_stride,
    D: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    expert = tl.arange(0, BLOCK_E)
    # int64: token * stride passes 2**31 elements long before memory is full.
    rows = x + token.to(tl.int64) * token_stride + head.to(tl.int64) * head_stride
    router = gate + (head * EXPERTS + expert).to(tl.int64) * D
    logits = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    for k in range(0, D, BLOCK_K):
        column = k + tl.arange(0, BLOCK_K)
        inside = column < D
        mask = (token < num_tokens)[:, None] & inside[None, :]
        a = tl.load(rows[:, None] + column[None, :], mask=mask, other=0.0)
        mask = inside[:, None] & (expert < EXPERTS)[None, :]
        b = tl.load(router[None, :] + column[:, None], mask=mask, other=0.0)
        if x.dtype.element_ty == tl.bfloat16:
            logits = split_product(a, b, logits, INTERPRETED)
        else:
            logits = multiply(a.to(tl.float32), b, logits, INTERPRETED)
    return logits


@triton.jit(do_not_specialize=["num_tokens"])
def route_tokens_kernel(
    x,
    gate,
    bias,
    choice,
    weights,
    num_tokens,
    token_stride,
    head_stride,
    route_scale,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SOFTMAX: tl.constexpr,
    NORM: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Experts and weights [num_tokens, HEADS, TOP_K] of x, gate [HEADS * EXPERTS, D] float32."""
    head = tl.program_id(1)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.arange(0, BLOCK_E)
    real = (expert < EXPERTS)[None, :]
    logit = _product(
        x,
        gate,
        token,
        num_tokens,
        head,
        token_stride,
        head_stride,
        D,
        EXPERTS,
        BLOCK_T,
        BLOCK_E,
        BLOCK_K,
        INTERPRETED,
    )
    if SOFTMAX:
        logit = tl.where(real, logit, float("-inf"))
        score = tl.exp(logit - tl.max(logit, 1)[:, None])
        score = score / tl.sum(score, 1)[:, None]
    else:
        score = tl.sigmoid(logit)
    shift = tl.load(bias + head * EXPERTS + expert, mask=expert < EXPERTS, other=0.0)
    key = tl.where(real, order_key(score + shift[None, :]), TAKEN)
    column = tl.arange(0, BLOCK_C)
    chosen = tl.zeros((BLOCK_T, BLOCK_C), tl.int32)
    weight = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    size = tl.zeros((BLOCK_T,), tl.float32)
    for k in tl.static_range(TOP_K):
        first, key = take_best(key, expert, BLOCK_E)
        picked = tl.sum(tl.where(expert[None, :] == first[:, None], score, 0.0), 1)
        size += tl.abs(picked)
        chosen = tl.where((column == k)[None, :], first[:, None], chosen)
        weight = tl.where((column == k)[None, :], picked[:, None], weight)
    if NORM:
        weight = weight / tl.where(size < 1e-12, 1e-12, size)[:, None]
    place = ((token.to(tl.int64) * HEADS + head) * TOP_K)[:, None] + column[None, :]
    mask = (token < num_tokens)[:, None] & (column < TOP_K)[None, :]
    tl.store(choice + place, chosen, mask=mask)
    tl.store(weights + place, weight * route_scale, mask=mask)
