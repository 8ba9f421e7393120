"""Router logits of bfloat16 tokens through parts of the router rows.

A float32 router row is the exact sum of three bfloat16 ones, as `router.py` explains. Here a launch
of its own takes the rows apart, once for all tokens, so that the product is a plain bfloat16 one.
"""

import triton
import triton.language as tl

from magi2.kernels.expert_blocks import multiply, split_in_three


@triton.jit
def split_gate_kernel(
    gate, parts, SIZE: tl.constexpr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr
):
    """`parts` [3, SIZE]: what bfloat16 leaves of what the larger parts leave, smallest first."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < SIZE
    value = tl.load(gate + place, mask=inside, other=0.0)
    hi, mid, lo = split_in_three(value, INTERPRETED)
    tl.store(parts + place, lo, mask=inside)
    tl.store(parts + SIZE + place, mid, mask=inside)
    tl.store(parts + 2 * SIZE + place, hi, mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def router_product_kernel(
    x,
    parts,
    logits,
    num_tokens,
    token_stride,
    head_stride,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """`logits` [HEADS, num_tokens, EXPERTS].

    A program owns BLOCK_T tokens of one head and all experts of that head.
    """
    head = tl.program_id(1)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.arange(0, BLOCK_E)
    live = token < num_tokens
    # int64: token * stride passes 2**31 elements long before memory is full.
    rows = x + token.to(tl.int64) * token_stride + head.to(tl.int64) * head_stride
    router = parts + (head * EXPERTS + expert).to(tl.int64) * D
    SIZE: tl.constexpr = HEADS * EXPERTS * D
    STEPS: tl.constexpr = (D + BLOCK_K - 1) // BLOCK_K
    logit = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    # One product a step, which keeps the loads of the next ones in flight: part after part.
    for step in range(0, 3 * STEPS):
        column = step % STEPS * BLOCK_K + tl.arange(0, BLOCK_K)
        part = router + tl.cast(step // STEPS, tl.int64) * SIZE
        known = live[:, None] & (column < D)[None, :]
        a = tl.load(rows[:, None] + column[None, :], mask=known, other=0.0)
        if EXPERTS == BLOCK_E and D % BLOCK_K == 0:
            b = tl.load(part[None, :] + column[:, None])
        else:
            known = (column < D)[:, None] & (expert < EXPERTS)[None, :]
            b = tl.load(part[None, :] + column[:, None], mask=known, other=0.0)
        logit = multiply(a, b, logit, INTERPRETED)
    row = head.to(tl.int64) * num_tokens + token
    known = live[:, None] & (expert < EXPERTS)[None, :]
    tl.store(logits + row[:, None] * EXPERTS + expert[None, :], logit, mask=known)
