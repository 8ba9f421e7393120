"""Routes into blocks by counting, in four launches: count, scan, place, scatter.

A chunk is CHUNK tokens of one head; its routes in order of (token, choice) are a slice of that
head's part of every expert's list. So the slot of a route is

    first slot of its expert + routes of that expert in earlier chunks + those before it in its own

and all three are counted, not raced for: integers, no atomics, the same slots in each run.

Example: one head, 2 experts, CHUNK = 2 tokens of one choice, blocks of 4; experts of tokens 0 to 4:
1 0 1 1 0.

    count      chunk 0: [1, 1]   chunk 1: [0, 2]   chunk 2: [1, 0]
    scan       before   [0, 0]            [1, 1]            [1, 3]    totals [2, 3]
    place      starts [0, 4], block_expert 0 1, padded_total 8
    scatter    token 3: expert 1, so 4 + 1 + 1 = slot 6
"""

import triton
import triton.language as tl


@triton.jit
def _chosen(
    choice,
    place,
    head,
    chunk,
    num_tokens,
    head_stride,
    token_stride,
    choice_stride,
    CHUNK: tl.constexpr,
    TOP_K: tl.constexpr,
):
    """Expert within the head of the chunk's routes at `place`, -1 beyond the last token."""
    token = chunk * CHUNK + place // TOP_K
    inside = (place < CHUNK * TOP_K) & (token < num_tokens)
    address = choice + head.to(tl.int64) * head_stride + token.to(tl.int64) * token_stride
    return tl.load(address + place % TOP_K * choice_stride, mask=inside, other=-1).to(tl.int32)


@triton.jit(do_not_specialize=["num_tokens"])
def count_routes_kernel(
    choice,
    counts,
    num_tokens,
    head_stride,
    token_stride,
    choice_stride,
    HEADS: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
    STEP: tl.constexpr,
):
    """`counts[chunk, head * EXPERTS + e]`: routes of a chunk that chose expert e of a head."""
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    expert = tl.arange(0, BLOCK_E)
    count = tl.zeros((BLOCK_E,), tl.int32)
    for first in range(0, CHUNK * TOP_K, STEP):
        chosen = _chosen(
            choice,
            first + tl.arange(0, STEP),
            head,
            chunk,
            num_tokens,
            head_stride,
            token_stride,
            choice_stride,
            CHUNK,
            TOP_K,
        )
        count += tl.sum((chosen[:, None] == expert[None, :]).to(tl.int32), axis=0)
    row = counts + chunk.to(tl.int64) * (HEADS * EXPERTS) + head * EXPERTS
    tl.store(row + expert, count, mask=expert < EXPERTS)


@triton.jit(do_not_specialize=["num_chunks"])
def scan_counts_kernel(
    counts, totals, num_chunks, ALL_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, STEP: tl.constexpr
):
    """Counts become sums over earlier chunks, in place; `totals[e]` is the sum over all chunks."""
    expert = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    before = tl.zeros((BLOCK_E,), tl.int32)
    first = 0
    while first < num_chunks:
        chunk = first + tl.arange(0, STEP)
        inside = (chunk < num_chunks)[:, None] & (expert < ALL_EXPERTS)[None, :]
        address = counts + chunk.to(tl.int64)[:, None] * ALL_EXPERTS + expert[None, :]
        count = tl.load(address, mask=inside, other=0)
        tl.store(address, before[None, :] + tl.cumsum(count, 0) - count, mask=inside)
        before += tl.sum(count, 0)
        first += STEP
    tl.store(totals + expert, before, mask=expert < ALL_EXPERTS)


@triton.jit(do_not_specialize=["num_blocks", "num_routes"])
def place_blocks_kernel(
    totals,
    starts,
    slots,
    block_expert,
    padded_total,
    num_blocks,
    num_routes,
    ALL_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """First slot of each expert, expert of each block, and all slots empty.

    Every program sums the experts for itself, which is cheaper than another launch.
    """
    expert = tl.arange(0, BLOCK_E)
    count = tl.load(totals + expert, mask=expert < ALL_EXPERTS, other=0)
    padded = (count + (BLOCK_ROWS - 1)) // BLOCK_ROWS * BLOCK_ROWS
    end = tl.cumsum(padded, 0)
    program = tl.program_id(0)
    if program == 0:
        tl.store(starts + expert, end - padded, mask=expert < ALL_EXPERTS)
        tl.store(padded_total, tl.sum(padded, 0))
    for i in range(BLOCKS):
        block = program * BLOCKS + i
        if block < num_blocks:
            behind = (end <= block * BLOCK_ROWS) & (expert < ALL_EXPERTS)
            tl.store(block_expert + block, tl.sum(behind.to(tl.int32), 0))
            slot = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
            tl.store(slots + slot, tl.zeros((BLOCK_ROWS,), tl.int32) + num_routes)


@triton.jit(do_not_specialize=["num_tokens"])
def scatter_routes_kernel(
    choice,
    before,
    starts,
    slots,
    num_tokens,
    head_stride,
    token_stride,
    choice_stride,
    HEADS: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
    ROUTES: tl.constexpr,
    STEP: tl.constexpr,
):
    """Each route number into its slot; ROUTES is the power of two from CHUNK * TOP_K on."""
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    place = tl.arange(0, ROUTES)
    mine = _chosen(
        choice,
        place,
        head,
        chunk,
        num_tokens,
        head_stride,
        token_stride,
        choice_stride,
        CHUNK,
        TOP_K,
    )
    rank = tl.zeros((ROUTES,), tl.int32)
    for first in range(0, CHUNK * TOP_K, STEP):
        other_place = first + tl.arange(0, STEP)
        other = _chosen(
            choice,
            other_place,
            head,
            chunk,
            num_tokens,
            head_stride,
            token_stride,
            choice_stride,
            CHUNK,
            TOP_K,
        )
        earlier = (other[None, :] == mine[:, None]) & (other_place[None, :] < place[:, None])
        rank += tl.sum(earlier.to(tl.int32), axis=1)
    live = mine >= 0
    expert = head * EXPERTS + mine
    row = before + chunk.to(tl.int64) * (HEADS * EXPERTS)
    slot = rank + tl.load(starts + expert, mask=live, other=0)
    slot += tl.load(row + expert, mask=live, other=0)
    token = chunk * CHUNK + place // TOP_K
    tl.store(slots + slot, (token * HEADS + head) * TOP_K + place % TOP_K, mask=live)
