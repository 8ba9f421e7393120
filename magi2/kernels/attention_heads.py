"""Elementwise work around the attention, each in one pass over the heads: store, weigh, gate.

A program owns BLOCK_T tokens and walks over HEADS_STEP heads of them. Fused multiply-add is off
where these are launched and the divisions are rounded to nearest, so that every operation rounds as
torch's eager one does; where bits may still differ is said at each kernel.
"""

import triton
import triton.language as tl

from magi2.kernels.expert_blocks import narrow, widen


@triton.jit(do_not_specialize=["num_tokens", "first_audio", "first_text"])
def store_heads_kernel(
    qkv,
    send,
    q_weight,
    k_weight,
    inverse,
    rotary,
    num_tokens,
    first_audio,
    first_text,
    row_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WORLD: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    GROUPS: tl.constexpr,
    HEADS_STEP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    INTERPRETED: tl.constexpr,
    ALIGNMENT: tl.constexpr = 0,
):
    """Rows of qkv, in modality order, to send [WORLD, num_tokens, heads of a rank, D], packed.

    q and k are normed, rotated and rounded once, v is moved. With the sum of a row's squares given,
    all bits are those of the eager form; that sum is added in another order.

    With an ALIGNMENT send is a table of int64 instead, the address for each rank of what would be
    send[rank], a multiple of so many bytes: memory of other GPUs, perhaps. The grid has one axis
    then, on which neighbours store for other ranks, so that links and own memory are busy at the
    same time.
    """
    PARTS: tl.constexpr = (HEADS + HEADS_STEP - 1) // HEADS_STEP
    KV_PARTS: tl.constexpr = (KV_HEADS + HEADS_STEP - 1) // HEADS_STEP
    # A program has heads of one kind: queries, keys, then values.
    if ALIGNMENT:
        block = tl.program_id(0) // (PARTS + 2 * KV_PARTS)
        part = tl.program_id(0) % (PARTS + 2 * KV_PARTS)
    else:
        block = tl.program_id(0)
        part = tl.program_id(1)
    token = block * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.arange(0, BLOCK_D)
    live = token < num_tokens
    inside = live[:, None] & (column < D)[None, :]
    row = tl.load(inverse + token, mask=live, other=0)
    # Channel j turns with j + HALF; the channels from 2 * HALF on stay.
    first = column < HALF
    turns = column < 2 * HALF
    partner = tl.where(first, column + HALF, tl.where(turns, column - HALF, column))
    angle = tl.where(first, column, column - HALF)
    table = rotary + token.to(tl.int64)[:, None] * (2 * HALF) + angle[None, :]
    turning = live[:, None] & turns[None, :]
    sin = tl.load(table, mask=turning, other=0.0)
    sin = tl.where(first[None, :], -sin, sin)
    cos = tl.load(table + HALF, mask=turning, other=1.0)
    columns = tl.full((BLOCK_T,), D, tl.float32)
    group = tl.zeros((BLOCK_T,), tl.int32)
    if GROUPS > 1:
        group += (row >= first_audio).to(tl.int32) + (row >= first_text).to(tl.int32)
    offset = (group * D)[:, None]
    LOCAL: tl.constexpr = HEADS // WORLD
    KV_LOCAL: tl.constexpr = KV_HEADS // WORLD
    SLOTS: tl.constexpr = LOCAL + 2 * KV_LOCAL
    queries = part < PARTS
    kind = tl.where(queries, 0, (part - PARTS) // KV_PARTS)  # of the others: 0 keys, 1 values
    start = tl.where(queries, part, (part - PARTS) % KV_PARTS) * HEADS_STEP
    count = tl.where(queries, HEADS, KV_HEADS)
    before = tl.where(queries, 0, HEADS + kind * KV_HEADS)
    local = tl.where(queries, LOCAL, KV_LOCAL)
    first_slot = tl.where(queries, 0, LOCAL + kind * KV_LOCAL)
    if queries:
        weight = tl.load(q_weight + offset + column[None, :], mask=inside, other=0.0)
        pair_weight = tl.load(q_weight + offset + partner[None, :], mask=inside, other=0.0)
    else:
        weight = tl.load(k_weight + offset + column[None, :], mask=inside, other=0.0)
        pair_weight = tl.load(k_weight + offset + partner[None, :], mask=inside, other=0.0)
    for step in range(HEADS_STEP):
        head = start + step
        if head < count:
            # int64: row * row_stride passes 2**31 at 233 thousand tokens.
            x_row = qkv + row.to(tl.int64)[:, None] * row_stride + (before + head) * D
            x = tl.load(x_row + column[None, :], mask=inside, other=0.0)
            if ALIGNMENT:
                base = tl.load(send + head // local).to(tl.pointer_type(qkv.dtype.element_ty))
                base = tl.multiple_of(base, ALIGNMENT)
                place = token.to(tl.int64)[:, None] * SLOTS + (first_slot + head % local)
                target = base + place * D + column[None, :]
            else:
                row_of_rank = (head // local).to(tl.int64) * num_tokens + token
                place = row_of_rank[:, None] * SLOTS + (first_slot + head % local)
                target = send + place * D + column[None, :]
            if kind == 1:
                tl.store(target, x, mask=inside)
            else:
                # The partner is loaded again rather than exchanged: it is in the nearest cache.
                pair = tl.load(x_row + partner[None, :], mask=inside, other=0.0)
                wide = widen(x, INTERPRETED)
                mean = tl.math.div_rn(tl.sum(wide * wide, axis=1), columns)
                scale = tl.rsqrt(mean + eps)[:, None]
                y = wide * scale * (1.0 + weight)
                pair_y = widen(pair, INTERPRETED) * scale * (1.0 + pair_weight)
                y = tl.where(turns[None, :], y * cos + pair_y * sin, y)
                tl.store(target, narrow(y, qkv.dtype.element_ty, INTERPRETED), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def weigh_heads_kernel(
    attended,
    lse,
    sink_total,
    out,
    num_tokens,
    token_stride,
    head_stride,
    lse_token_stride,
    lse_head_stride,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    HEADS_STEP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Attended heads, weighed for the sinks, to out [num_tokens, HEADS, D].

    out = attended * exp(lse - logaddexp(lse, sink_total)), rounded once.

    The weight is 1 / (1 + exp(sink_total - lse)), the same number by fewer roundings: a few units
    of float32 from the eager form's, so that one in thousands of 16-bit results is its neighbour.
    It is 0 where that difference is no number: lse is not finite, or sink_total is NaN.
    """
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.arange(0, BLOCK_D)
    live = token < num_tokens
    inside = live[:, None] & (column < D)[None, :]
    wide_token = token.to(tl.int64)
    for step in range(HEADS_STEP):
        head = tl.program_id(1) * HEADS_STEP + step
        if head < HEADS:
            sums = lse + wide_token * lse_token_stride + head * lse_head_stride
            without = tl.load(sums, mask=live, other=0.0)
            total = tl.load(sink_total + head)
            # One selection a row: NaN fails every comparison, and exp(inf) leaves nothing.
            total = tl.where(total == total, total, float("inf"))
            finite = tl.abs(without) < float("inf")
            difference = tl.where(finite, total - without, float("inf"))
            weight = tl.math.div_rn(1.0, 1.0 + tl.exp(difference))
            source = attended + wide_token[:, None] * token_stride + head * head_stride
            x = widen(tl.load(source + column[None, :], mask=inside, other=0.0), INTERPRETED)
            target = out + (wide_token[:, None] * HEADS + head) * D + column[None, :]
            y = narrow(x * weight[:, None], out.dtype.element_ty, INTERPRETED)
            tl.store(target, y, mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def gate_heads_kernel(
    received,
    permutation,
    gate,
    out,
    num_tokens,
    token_stride,
    rank_stride,
    head_stride,
    gate_stride,
    HEADS: tl.constexpr,
    LOCAL: tl.constexpr,
    D: tl.constexpr,
    HEADS_STEP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Rows of received times the sigmoid of their gates, to out [num_tokens, HEADS * D].

    received is in packed order, any strides, LOCAL heads of each rank; gate and out are in modality
    order. The gate is rounded to its dtype before the product, as in eager code: the same bits but
    where another exponential moves that rounding, and then a neighbouring gate.
    """
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.arange(0, BLOCK_D)
    live = token < num_tokens
    inside = live[:, None] & (column < D)[None, :]
    # int64: a row number times its stride passes 2**31 elements long before memory is full.
    row = tl.load(permutation + token, mask=live, other=0).to(tl.int64)
    wide_token = token.to(tl.int64)
    for step in range(HEADS_STEP):
        head = tl.program_id(1) * HEADS_STEP + step
        if head < HEADS:
            logit = tl.load(gate + wide_token * gate_stride + head, mask=live, other=0.0)
            share = tl.math.div_rn(1.0, 1.0 + tl.exp(-widen(logit, INTERPRETED)))
            share = widen(narrow(share, gate.dtype.element_ty, INTERPRETED), INTERPRETED)
            place = (head // LOCAL).to(tl.int64) * rank_stride + (head % LOCAL) * head_stride
            source = received + row[:, None] * token_stride + place + column[None, :]
            x = widen(tl.load(source, mask=inside, other=0.0), INTERPRETED)
            target = out + (wide_token[:, None] * HEADS + head) * D + column[None, :]
            y = narrow(x * share[:, None], out.dtype.element_ty, INTERPRETED)
            tl.store(target, y, mask=inside)
