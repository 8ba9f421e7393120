"""The top k of a tile of logits, in few operations a logit, and the kernel that reads them.

Order among the experts: descending biased score; equal scores by ascending number; NaN before all
others, as torch.topk has it. -0.0 equals 0.0, and -inf is a score like any other: the choices of a
token always differ and are always experts.
"""

import triton
import triton.language as tl

TAKEN = tl.constexpr(-(2**31))  # below the key of every score, -inf included
_NAN = tl.constexpr(2**31 - 1)


@triton.jit
def order_key(score):
    """An int32 that orders float32 sums of a score and a bias, NaN highest.

    None of them is -0.0, which would lie below 0.0: a score is positive or 0.0.
    """
    bits = score.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(score == score, key, _NAN)


@triton.jit
def take_best(key, expert, LAST: tl.constexpr):
    """First expert of the highest key in each row, and the keys without it; LAST is no expert."""
    best = tl.max(key, 1)
    first = tl.min(tl.where(key == best[:, None], expert[None, :], LAST), 1)
    return first, tl.where(expert[None, :] == first[:, None], TAKEN, key)


@triton.jit
def choose(
    logit,
    logits,
    bias,
    choice,
    weights,
    token,
    num_tokens,
    head,
    route_scale,
    HEADS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SOFTMAX: tl.constexpr,
    NORM: tl.constexpr,
):
    """Experts and weights of the tokens whose logits [BLOCK_T, BLOCK_E] are given.

    The same logits have to be in memory, `logits` [HEADS, num_tokens, EXPERTS]: those of the chosen
    experts are read from there, so that a program keeps one number for each expert and not two.
    """
    expert = tl.arange(0, BLOCK_E)
    real = (expert < EXPERTS)[None, :]
    live = token < num_tokens
    shift = tl.load(bias + head * EXPERTS + expert, mask=expert < EXPERTS, other=0.0)
    if SOFTMAX:
        logit = tl.where(real, logit, float("-inf"))
        most = tl.max(logit, 1)
        score = tl.exp(logit - most[:, None])
        whole = tl.sum(score, 1)
        score = score / whole[:, None]
    else:
        score = tl.sigmoid(logit)
    key = order_key(score + shift[None, :])
    if EXPERTS != BLOCK_E:
        key = tl.where(real, key, TAKEN)
    column = tl.arange(0, BLOCK_C)
    chosen = tl.zeros((BLOCK_T, BLOCK_C), tl.int32)
    for k in tl.static_range(TOP_K):
        first, key = take_best(key, expert, BLOCK_E)
        chosen = tl.where((column == k)[None, :], first[:, None], chosen)
    row = head.to(tl.int64) * num_tokens + token
    mask = live[:, None] & (column < TOP_K)[None, :]
    picked = tl.load(logits + row[:, None] * EXPERTS + chosen, mask=mask, other=0.0)
    weight = tl.sigmoid(picked)
    if SOFTMAX:
        weight = tl.exp(picked - most[:, None]) / whole[:, None]
    if NORM:
        size = tl.sum(tl.where((column < TOP_K)[None, :], tl.abs(weight), 0.0), 1)
        weight = weight / tl.where(size < 1e-12, 1e-12, size)[:, None]
    place = ((token.to(tl.int64) * HEADS + head) * TOP_K)[:, None] + column[None, :]
    tl.store(choice + place, chosen, mask=mask)
    tl.store(weights + place, weight * route_scale, mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def choose_from_logits_kernel(
    logits,
    bias,
    choice,
    weights,
    num_tokens,
    route_scale,
    HEADS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    SOFTMAX: tl.constexpr,
    NORM: tl.constexpr,
):
    """Experts and weights [num_tokens, HEADS, TOP_K] of logits [HEADS, num_tokens, EXPERTS]."""
    head = tl.program_id(1)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.arange(0, BLOCK_E)
    row = head.to(tl.int64) * num_tokens + token
    mask = (token < num_tokens)[:, None] & (expert < EXPERTS)[None, :]
    address = logits + row[:, None] * EXPERTS + expert[None, :]
    choose(
        tl.load(address, mask=mask, other=0.0),
        logits,
        bias,
        choice,
        weights,
        token,
        num_tokens,
        head,
        route_scale,
        HEADS,
        EXPERTS,
        TOP_K,
        BLOCK_T,
        BLOCK_E,
        BLOCK_C,
        SOFTMAX,
        NORM,
    )
