"""Routes into blocks by counting, in four launches: rank, scan, place, fill.

A chunk is TOKENS tokens of one head; its routes in order of (token, choice) are a slice of that
head's part of every expert's list. So the slot of a route is

    first slot of its expert + routes of that expert in earlier chunks + those before it in its own

and all three are counted, not raced for: integers, no atomics, the same slots in each run.

Counts lie in `ledger` [chunks + 3, all experts]: a row for each chunk, then routes, first slot and
end (behind the last block) of each expert.

Example: one head, 2 experts, chunks of 2 tokens with one choice, blocks of 4; experts of tokens 0
to 4: 1 0 1 1 0.

    rank       0 0 | 0 1 | 0; counts [1, 1] [0, 2] [1, 0]
    scan       before [0, 0] [1, 1] [1, 3]; routes [2, 3]
    place      first slot [0, 4]; end [4, 8]; padded_total 8
    fill       token 3: expert 1, so 4 + 1 + 1 = slot 6; slots 2, 3 and 7 are empty
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_tokens"])
def rank_routes_kernel(
    choice,
    ranks,
    ledger,
    num_tokens,
    head_stride,
    token_stride,
    choice_stride,
    HEADS: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TOKENS: tl.constexpr,
    ROUTES: tl.constexpr,
):
    """Routes of the same expert before each one in its chunk, by route number, and the counts.

    ROUTES is a power of two from TOKENS * TOP_K on.
    """
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    row = ledger + chunk.to(tl.int64) * (HEADS * EXPERTS) + head * EXPERTS
    expert = tl.arange(0, BLOCK_E)
    tl.store(row + expert, tl.zeros((BLOCK_E,), tl.int32), mask=expert < EXPERTS)

    place = tl.arange(0, ROUTES)
    token = chunk * TOKENS + place // TOP_K
    live = (place < TOKENS * TOP_K) & (token < num_tokens)
    address = choice + head.to(tl.int64) * head_stride + token.to(tl.int64) * token_stride
    mine = tl.load(address + place % TOP_K * choice_stride, mask=live, other=-1).to(tl.int32)
    # One pass counts both sides: routes before in the lower half, routes behind in the upper.
    side = tl.where(place[:, None] < place[None, :], 1, 65536)
    side = tl.where(place[:, None] == place[None, :], 0, side)
    same = tl.sum(tl.where(mine[:, None] == mine[None, :], side, 0), axis=0)
    rank = same & 0xFFFF
    tl.store(ranks + (token * HEADS + head) * TOP_K + place % TOP_K, rank, mask=live)
    tl.debug_barrier()  # the row is zero before the last route of each expert counts them all
    tl.store(row + mine, rank + 1, mask=live & (same < 65536))


@triton.jit(do_not_specialize=["num_chunks"])
def scan_counts_kernel(
    ledger, num_chunks, ALL_EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, STEP: tl.constexpr
):
    """Counts become sums over earlier chunks, in place; the row behind them is the sum of all."""
    expert = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    before = tl.zeros((BLOCK_E,), tl.int32)
    first = 0
    while first < num_chunks:
        chunk = first + tl.arange(0, STEP)
        inside = (chunk < num_chunks)[:, None] & (expert < ALL_EXPERTS)[None, :]
        address = ledger + chunk.to(tl.int64)[:, None] * ALL_EXPERTS + expert[None, :]
        count = tl.load(address, mask=inside, other=0)
        tl.store(address, before[None, :] + tl.cumsum(count, 0) - count, mask=inside)
        before += tl.sum(count, 0)
        first += STEP
    routes = ledger + tl.cast(num_chunks, tl.int64) * ALL_EXPERTS
    tl.store(routes + expert, before, mask=expert < ALL_EXPERTS)


@triton.jit(do_not_specialize=["num_chunks"])
def place_experts_kernel(
    ledger,
    padded_total,
    num_chunks,
    ALL_EXPERTS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """First slot and end of each expert, in one program."""
    expert = tl.arange(0, BLOCK_E)
    real = expert < ALL_EXPERTS
    routes = ledger + tl.cast(num_chunks, tl.int64) * ALL_EXPERTS
    count = tl.load(routes + expert, mask=real, other=0)
    padded = (count + (BLOCK_ROWS - 1)) // BLOCK_ROWS * BLOCK_ROWS
    end = tl.cumsum(padded, 0)
    tl.store(routes + ALL_EXPERTS + expert, end - padded, mask=real)
    tl.store(routes + 2 * ALL_EXPERTS + expert, end, mask=real)
    tl.store(padded_total, tl.sum(padded, 0))


@triton.jit(do_not_specialize=["num_chunks", "num_routes", "num_blocks"])
def fill_slots_kernel(
    choice,
    ranks,
    ledger,
    slots,
    block_expert,
    num_chunks,
    num_routes,
    num_blocks,
    head_stride,
    token_stride,
    choice_stride,
    HEADS: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    STEPS: tl.constexpr,
    PLACES: tl.constexpr,
):
    """Each route number into its slot; `num_routes` into all others, and the expert of each block.

    The first programs take BLOCKS blocks each, the others PLACES routes: they write different
    slots, so that their order does not matter. 2 ** STEPS is more than all experts are.
    """
    ALL_EXPERTS: tl.constexpr = HEADS * EXPERTS
    routes = ledger + tl.cast(num_chunks, tl.int64) * ALL_EXPERTS
    program = tl.program_id(0)
    block_programs = tl.cdiv(num_blocks, BLOCKS)
    if program < block_programs:
        block = program * BLOCKS + tl.arange(0, BLOCKS)
        # Experts whose end is not behind the first slot, by bisection: ends ascend.
        owner = tl.zeros((BLOCKS,), tl.int32)
        for i in tl.static_range(STEPS):
            ahead = owner + (1 << (STEPS - 1 - i))
            known = ahead <= ALL_EXPERTS
            end = tl.load(routes + 2 * ALL_EXPERTS + ahead - 1, mask=known, other=0)
            owner = tl.where(known & (end <= block * BLOCK_ROWS), ahead, owner)
        inside = block < num_blocks
        tl.store(block_expert + block, owner, mask=inside)
        real = inside & (owner < ALL_EXPERTS)
        live_end = tl.load(routes + ALL_EXPERTS + owner, mask=real, other=0)
        live_end += tl.load(routes + owner, mask=real, other=0)
        slot = block[:, None] * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[None, :]
        empty = inside[:, None] & (slot >= live_end[:, None])
        tl.store(slots + slot, tl.zeros((BLOCKS, BLOCK_ROWS), tl.int32) + num_routes, mask=empty)
    else:
        first = (program - block_programs) * PLACES
        # The difference cannot overflow where the sum of both might.
        live = tl.arange(0, PLACES) < num_routes - first
        number = first + tl.arange(0, PLACES)
        token = number // (HEADS * TOP_K)
        head = number // TOP_K % HEADS
        address = choice + head.to(tl.int64) * head_stride + token.to(tl.int64) * token_stride
        address += number % TOP_K * choice_stride
        expert = head * EXPERTS + tl.load(address, mask=live, other=0).to(tl.int32)
        target = tl.load(ranks + number, mask=live, other=0)
        target += tl.load(routes + ALL_EXPERTS + expert, mask=live, other=0)
        row = ledger + (token // TOKENS).to(tl.int64) * ALL_EXPERTS
        target += tl.load(row + expert, mask=live, other=0)
        tl.store(slots + target, number, mask=live)
