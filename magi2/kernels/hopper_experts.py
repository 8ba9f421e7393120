"""The fused experts for Hopper, its warps divided by role; written in Gluon, part of Triton 3.6.

One warp fetches weight tiles into a ring of shared memory with the bulk copy engine. Two groups of
four warps multiply, 64 rows of a block of 128 routes each, at their own pace: while one of them
activates, the other keeps the matrix units busy. For each 64 inner channels three tiles of 32 kB
go through the ring:

    [gate | up] of input channels 0 to 127
    [gate | up] of input channels 128 to 255
    down
    each group   gate | up = x @ both;  hidden = swiglu7(gate, up), rounded;  total += hidden @ down

A slot is filled when its `ready` barrier has its bytes, and free when both groups have arrived at
its `free` barrier. Phases count the rounds of a ring; a first wait for the phase before the first
returns at once. The rows of a group's next block are fetched while it stores the one before.

Blocks are handed out in order, to whichever program is free: the blocks of an expert then run at
about the same time and find its weights in the cache. (With a fixed share for each program they
drift apart, since half-empty blocks take half the time, and more weights are read from memory
again: 3.5 GB of traffic instead of 2.3 at 347 routes an expert, of which 1.7 are needed.) The
fetching warp draws the number and passes it on. No result depends on who computed it.

The busiest unit where experts have several blocks is the L2 cache, which gives each block 2 MB of
weights: at 81 % of its peak by the counters, the matrix units at 64 %. Two programs that share
their fetches would halve that, for which Gluon of Triton 3.6 has no means.

Sums are those of the plain fused kernel: ascending tiles in one float32 accumulator.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

HALF = gl.constexpr(64)  # rows of a group: one instruction of the matrix unit
DIM = gl.constexpr(256)  # channels of a head
DEPTH = gl.constexpr(128)  # channels of a gate tile
INNER = gl.constexpr(64)  # inner channels of a step
TILE_BYTES = gl.constexpr(2 * 128 * 128)
ONE = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))


@gluon.jit
def _fetch_weights(
    weights, rings, block_expert, cursor, num_blocks, F: gl.constexpr, SLOTS: gl.constexpr
):
    w_gate, w_up, w_down = weights
    ring, downs, ready, free, turns, turn_ready, turn_free = rings
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    step = 0
    turn = 0
    block = gl.program_id(0)
    while block < num_blocks:
        mbarrier.wait(turn_free.index(turn & 1), (turn >> 1 & 1) ^ 1)
        turns.index(turn & 1).store(gl.full([1], block, gl.int32, one))
        mbarrier.arrive(turn_ready.index(turn & 1), count=1)
        turn += 1
        # Asked for early: it is needed only after the weights of this block.
        following = gl.num_programs(0) + gl.atomic_add(cursor, 1)
        expert = gl.load(block_expert + block)
        for f in range(0, F, INNER):
            for k in gl.static_range(2):
                slot = step % SLOTS
                mbarrier.wait(free.index(slot), (step // SLOTS & 1) ^ 1)
                bar = ready.index(slot)
                mbarrier.expect(bar, TILE_BYTES)
                row = expert * DIM + k * DEPTH
                tma.async_copy_global_to_shared(w_gate, [row, f], bar, ring.index(2 * slot))
                tma.async_copy_global_to_shared(w_up, [row, f], bar, ring.index(2 * slot + 1))
                step += 1
            slot = step % SLOTS
            mbarrier.wait(free.index(slot), (step // SLOTS & 1) ^ 1)
            bar = ready.index(slot)
            mbarrier.expect(bar, TILE_BYTES)
            tma.async_copy_global_to_shared(w_down, [expert * F + f, 0], bar, downs.index(slot))
            step += 1
        block = following
    mbarrier.wait(turn_free.index(turn & 1), (turn >> 1 & 1) ^ 1)
    turns.index(turn & 1).store(gl.full([1], num_blocks, gl.int32, one))
    mbarrier.arrive(turn_ready.index(turn & 1), count=1)


@gluon.jit
def _next_block(rings, turn):
    """The block of a turn, from the fetching warp; the number of blocks when there is none."""
    _, _, _, _, turns, turn_ready, turn_free = rings
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    mbarrier.wait(turn_ready.index(turn & 1), turn >> 1 & 1)
    block = gl.max(turns.index(turn & 1).load(one), 0)
    mbarrier.arrive(turn_free.index(turn & 1), count=1)
    return block


@gluon.jit
def _fetch_rows(rows, routed, block, HEADS: gl.constexpr, TOP_K: gl.constexpr, PART: gl.constexpr):
    """Start to copy a group's input rows; behind the last block, those of the last once more."""
    x, _, _, slots, num_blocks, num_routes, token_stride, head_stride = routed
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    block = gl.minimum(block, num_blocks - 1)
    place = gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
    route = gl.load(slots + block * (2 * HALF) + PART * HALF + place)
    row = gl.where(route < num_routes, route, 0) // TOP_K
    start = (row // HEADS).to(gl.int64) * token_stride + (row % HEADS).to(gl.int64) * head_stride
    column = gl.arange(0, DEPTH, layout=gl.SliceLayout(0, layout))
    address = x + gl.expand_dims(start, 1) + gl.expand_dims(column, 0)
    async_copy.async_copy_global_to_shared(rows.index(2 * PART), address)
    async_copy.async_copy_global_to_shared(rows.index(2 * PART + 1), address + DEPTH)
    async_copy.commit_group()


@gluon.jit
def _store(out, total, weights, slots, block, num_routes, PART: gl.constexpr):
    layout: gl.constexpr = total.type.layout
    place = gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
    route = gl.load(slots + block * (2 * HALF) + PART * HALF + place)
    live = route < num_routes
    weight = gl.load(weights + route, mask=live, other=0.0)
    column = gl.arange(0, DIM, layout=gl.SliceLayout(0, layout))
    address = out + gl.expand_dims(route.to(gl.int64) * DIM, 1) + gl.expand_dims(column, 0)
    result = (total * gl.expand_dims(weight, 1)).to(out.dtype.element_ty)
    gl.store(address, result, mask=gl.expand_dims(live, 1))


@gluon.jit
def _start_gates(
    rows, both, ready, step, wide: gl.constexpr, SLOTS: gl.constexpr, PART: gl.constexpr
):
    """Start the products of a step with gate and up, in two tiles of the ring."""
    pair = gl.zeros([HALF, 2 * INNER], gl.float32, wide)
    slot = step % SLOTS
    mbarrier.wait(ready.index(slot), step // SLOTS & 1)
    pair = warpgroup_mma(rows.index(2 * PART), both.index(slot), pair, use_acc=False, is_async=True)
    slot = (step + 1) % SLOTS
    mbarrier.wait(ready.index(slot), (step + 1) // SLOTS & 1)
    return warpgroup_mma(rows.index(2 * PART + 1), both.index(slot), pair, is_async=True)


@gluon.jit
def _activate(pair, inner: gl.constexpr, operand: gl.constexpr, DTYPE: gl.constexpr):
    gate, up = pair.reshape([HALF, 2, INNER]).permute((0, 2, 1)).split()
    gate = gl.convert_layout(gate, inner)
    up = gl.convert_layout(up, inner)
    gate = gl.where(gate > 7.0, 7.0, gate)
    up = gl.where(up > 7.0, 7.0, gl.where(up < -7.0, -7.0, up))
    hidden = gate / (1.0 + gl.exp(-1.702 * gate)) * (up + 1.0)
    return gl.convert_layout(hidden.to(DTYPE), operand)


@gluon.jit
def _start_down(
    pair,
    total,
    downs,
    ready,
    free,
    step,
    inner: gl.constexpr,
    operand: gl.constexpr,
    DTYPE: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """Wait for gate and up, free their tiles, activate, and start to add the step's products."""
    pair = warpgroup_mma_wait(0, deps=[pair])
    mbarrier.arrive(free.index(step % SLOTS), count=1)
    mbarrier.arrive(free.index((step + 1) % SLOTS), count=1)
    hidden = _activate(pair, inner, operand, DTYPE)
    slot = (step + 2) % SLOTS
    mbarrier.wait(ready.index(slot), (step + 2) // SLOTS & 1)
    return warpgroup_mma(hidden, downs.index(slot), total, is_async=True)


@gluon.jit
def _multiply(
    rows,
    both,
    rings,
    routed,
    HEADS: gl.constexpr,
    TOP_K: gl.constexpr,
    F: gl.constexpr,
    SLOTS: gl.constexpr,
    PART: gl.constexpr,
):
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    inner: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    outer: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, outer, 2)
    _, downs, ready, free, _, _, _ = rings
    x, out, weights, slots, num_blocks, num_routes, _, _ = routed
    step = 0
    turn = 0
    block = _next_block(rings, turn)
    _fetch_rows(rows, routed, block, HEADS, TOP_K, PART)
    while block < num_blocks:
        async_copy.wait_group(0)
        fence_async_shared()
        total = gl.zeros([HALF, DIM], gl.float32, outer)
        # The slots of a block are filled from the front: where the first is empty, all are.
        if gl.load(slots + block * (2 * HALF) + PART * HALF) < num_routes:
            pair = _start_gates(rows, both, ready, step, wide, SLOTS, PART)
            for _ in range(0, F - INNER, INNER):
                total = _start_down(
                    pair, total, downs, ready, free, step, inner, operand, x.dtype.element_ty, SLOTS
                )
                # The next step's products follow these at once.
                pair = _start_gates(rows, both, ready, step + 3, wide, SLOTS, PART)
                total = warpgroup_mma_wait(2, deps=[total])
                mbarrier.arrive(free.index((step + 2) % SLOTS), count=1)
                step += 3
            total = _start_down(
                pair, total, downs, ready, free, step, inner, operand, x.dtype.element_ty, SLOTS
            )
            total = warpgroup_mma_wait(0, deps=[total])
            mbarrier.arrive(free.index((step + 2) % SLOTS), count=1)
            step += 3
        else:
            for _ in range(0, 3 * F, INNER):
                slot = step % SLOTS
                mbarrier.wait(ready.index(slot), step // SLOTS & 1)
                mbarrier.arrive(free.index(slot), count=1)
                step += 1
        turn += 1
        following = _next_block(rings, turn)
        _fetch_rows(rows, routed, following, HEADS, TOP_K, PART)
        _store(out, total, weights, slots, block, num_routes, PART)
        block = following
    async_copy.wait_group(0)


@gluon.jit(do_not_specialize=["num_routes"])
def hopper_experts_kernel(
    x,
    w_gate,
    w_up,
    w_down,
    out,
    weights,
    slots,
    block_expert,
    padded_total,
    cursor,
    num_routes,
    token_stride,
    head_stride,
    HEADS: gl.constexpr,
    TOP_K: gl.constexpr,
    F: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """As `fused_experts_kernel`, in blocks of 128 rows, D = 256 and F a multiple of 64.

    The weights are descriptors of [experts * D, F] in blocks [128, 64], and of [experts * F, D] in
    blocks [64, D]. cursor is an int32 of zero.
    """
    dtype: gl.constexpr = x.dtype.element_ty
    rows = gl.allocate_shared_memory(
        dtype, [4, HALF, DEPTH], gl.NVMMASharedLayout.get_default_for([HALF, DEPTH], dtype)
    )
    ring = gl.allocate_shared_memory(dtype, [2 * SLOTS, DEPTH, INNER], w_gate.layout)
    # Tiles of 64 columns lie one behind the other: a gate and an up tile are one of 128.
    both = ring._reinterpret(
        dtype,
        [SLOTS, DEPTH, 2 * INNER],
        gl.NVMMASharedLayout.get_default_for([DEPTH, 2 * INNER], dtype),
    )
    downs = ring._reinterpret(dtype, [SLOTS, INNER, DIM], w_down.layout)
    single: gl.constexpr = mbarrier.MBarrierLayout()
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], single)
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], single)
    turn_ready = gl.allocate_shared_memory(gl.int64, [2, 1], single)
    turn_free = gl.allocate_shared_memory(gl.int64, [2, 1], single)
    turns = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for i in gl.static_range(SLOTS):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(turn_ready.index(i), count=1)
        mbarrier.init(turn_free.index(i), count=2)
    fence_async_shared()
    num_blocks = gl.load(padded_total) // (2 * HALF)
    rings = (ring, downs, ready, free, turns, turn_ready, turn_free)
    routed = (x, out, weights, slots, num_blocks, num_routes, token_stride, head_stride)
    banks = (w_gate, w_up, w_down)
    gl.warp_specialize(
        [
            (_multiply, (rows, both, rings, routed, HEADS, TOP_K, F, SLOTS, 0)),
            (_multiply, (rows, both, rings, routed, HEADS, TOP_K, F, SLOTS, 1)),
            (_fetch_weights, (banks, rings, block_expert, cursor, num_blocks, F, SLOTS)),
        ],
        [4, 1],
        [240, 24],
    )


def bank_descriptor(bank: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Tiles [rows, columns] of a bank [experts, ROWS, COLUMNS], its experts below one another."""
    dtype = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[bank.dtype]
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
    return TensorDescriptor.from_tensor(bank.flatten(0, 1), [rows, columns], layout)
