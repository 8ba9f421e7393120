"""The fused experts for Hopper, its warps divided by role; written in Gluon, part of Triton 3.6.

A program walks over blocks of 128 routes. Two warps fetch weight tiles into rings of shared memory
with the bulk copy engine. Two groups of four warps multiply, 64 rows each, at their own pace: while
one of them activates, the other keeps the matrix units busy.

    one warp     [gate, up] of tile f into a ring of GATE_SLOTS
    another      down of tile f into a ring of DOWN_SLOTS
    each group   gate, up = x @ [gate, up]; hidden = swiglu7(gate, up), rounded
                 total += hidden @ down

A slot is filled when its `ready` barrier has its bytes, and free when both groups have arrived at
its `free` barrier. Phases count the rounds of a ring; a first wait for the phase before the first
returns at once. The rows of a group's next block are fetched while it stores the one before.

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


@gluon.jit
def _fetch_gates(
    weights,
    rings,
    block_expert,
    num_blocks,
    D: gl.constexpr,
    F: gl.constexpr,
    BLOCK_F: gl.constexpr,
    GATE_SLOTS: gl.constexpr,
):
    w_gate, w_up, _ = weights
    gates, ups, _, ready, free, _, _ = rings
    step = 0
    for block in range(gl.program_id(0), num_blocks, gl.num_programs(0)):
        expert = gl.load(block_expert + block)
        for f in range(0, F, BLOCK_F):
            slot = step % GATE_SLOTS
            mbarrier.wait(free.index(slot), (step // GATE_SLOTS & 1) ^ 1)
            bar = ready.index(slot)
            mbarrier.expect(bar, 4 * D * BLOCK_F)
            tma.async_copy_global_to_shared(w_gate, [expert * D, f], bar, gates.index(slot))
            tma.async_copy_global_to_shared(w_up, [expert * D, f], bar, ups.index(slot))
            step += 1


@gluon.jit
def _fetch_downs(
    weights,
    rings,
    block_expert,
    num_blocks,
    D: gl.constexpr,
    F: gl.constexpr,
    BLOCK_F: gl.constexpr,
    DOWN_SLOTS: gl.constexpr,
):
    _, _, w_down = weights
    _, _, downs, _, _, ready, free = rings
    step = 0
    for block in range(gl.program_id(0), num_blocks, gl.num_programs(0)):
        expert = gl.load(block_expert + block)
        for f in range(0, F, BLOCK_F):
            slot = step % DOWN_SLOTS
            mbarrier.wait(free.index(slot), (step // DOWN_SLOTS & 1) ^ 1)
            bar = ready.index(slot)
            mbarrier.expect(bar, 2 * D * BLOCK_F)
            tma.async_copy_global_to_shared(w_down, [expert * F + f, 0], bar, downs.index(slot))
            step += 1


@gluon.jit
def _fetch_rows(
    rows,
    x,
    slots,
    block,
    num_blocks,
    num_routes,
    token_stride,
    head_stride,
    HEADS: gl.constexpr,
    TOP_K: gl.constexpr,
    D: gl.constexpr,
    PART: gl.constexpr,
):
    """Start to copy a group's input rows; behind the last block, those of the last once more."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    block = gl.minimum(block, num_blocks - 1)
    place = gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
    route = gl.load(slots + block * (2 * HALF) + PART * HALF + place)
    row = gl.where(route < num_routes, route, 0) // TOP_K
    start = (row // HEADS).to(gl.int64) * token_stride + (row % HEADS).to(gl.int64) * head_stride
    column = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    address = x + gl.expand_dims(start, 1) + gl.expand_dims(column, 0)
    async_copy.async_copy_global_to_shared(rows, address)
    async_copy.commit_group()


@gluon.jit
def _store(out, total, weights, slots, block, num_routes, D: gl.constexpr, PART: gl.constexpr):
    layout: gl.constexpr = total.type.layout
    place = gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
    route = gl.load(slots + block * (2 * HALF) + PART * HALF + place)
    live = route < num_routes
    weight = gl.load(weights + route, mask=live, other=0.0)
    column = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
    address = out + gl.expand_dims(route.to(gl.int64) * D, 1) + gl.expand_dims(column, 0)
    result = (total * gl.expand_dims(weight, 1)).to(out.dtype.element_ty)
    gl.store(address, result, mask=gl.expand_dims(live, 1))


@gluon.jit
def _multiply(
    rows,
    rings,
    routed,
    HEADS: gl.constexpr,
    TOP_K: gl.constexpr,
    D: gl.constexpr,
    F: gl.constexpr,
    BLOCK_F: gl.constexpr,
    GATE_SLOTS: gl.constexpr,
    DOWN_SLOTS: gl.constexpr,
    PART: gl.constexpr,
):
    inner: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_F, 16])
    outer: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, outer, 2)
    gates, ups, downs, gate_ready, gate_free, down_ready, down_free = rings
    x, out, weights, slots, num_blocks, num_routes, token_stride, head_stride = routed
    mine = rows.index(PART)
    first = gl.program_id(0)
    _fetch_rows(
        mine,
        x,
        slots,
        first,
        num_blocks,
        num_routes,
        token_stride,
        head_stride,
        HEADS,
        TOP_K,
        D,
        PART,
    )
    step = 0
    for block in range(first, num_blocks, gl.num_programs(0)):
        async_copy.wait_group(0)
        fence_async_shared()
        total = gl.zeros([HALF, D], gl.float32, outer)
        # The slots of a block are filled from the front: where the first is empty, all are.
        if gl.load(slots + block * (2 * HALF) + PART * HALF) < num_routes:
            for _ in range(0, F, BLOCK_F):
                zeros = gl.zeros([HALF, BLOCK_F], gl.float32, inner)
                slot = step % GATE_SLOTS
                mbarrier.wait(gate_ready.index(slot), step // GATE_SLOTS & 1)
                gate = warpgroup_mma(mine, gates.index(slot), zeros, use_acc=False, is_async=True)
                up = warpgroup_mma(mine, ups.index(slot), zeros, use_acc=False, is_async=True)
                gate, up = warpgroup_mma_wait(0, deps=[gate, up])
                mbarrier.arrive(gate_free.index(slot), count=1)
                gate = gl.where(gate > 7.0, 7.0, gate)
                up = gl.where(up > 7.0, 7.0, gl.where(up < -7.0, -7.0, up))
                hidden = gate / (1.0 + gl.exp(-1.702 * gate)) * (up + 1.0)
                hidden = gl.convert_layout(hidden.to(x.dtype.element_ty), operand)
                slot = step % DOWN_SLOTS
                mbarrier.wait(down_ready.index(slot), step // DOWN_SLOTS & 1)
                total = warpgroup_mma(hidden, downs.index(slot), total, is_async=True)
                total = warpgroup_mma_wait(0, deps=[total])
                mbarrier.arrive(down_free.index(slot), count=1)
                step += 1
        else:
            for _ in range(0, F, BLOCK_F):
                slot = step % GATE_SLOTS
                mbarrier.wait(gate_ready.index(slot), step // GATE_SLOTS & 1)
                mbarrier.arrive(gate_free.index(slot), count=1)
                slot = step % DOWN_SLOTS
                mbarrier.wait(down_ready.index(slot), step // DOWN_SLOTS & 1)
                mbarrier.arrive(down_free.index(slot), count=1)
                step += 1
        _fetch_rows(
            mine,
            x,
            slots,
            block + gl.num_programs(0),
            num_blocks,
            num_routes,
            token_stride,
            head_stride,
            HEADS,
            TOP_K,
            D,
            PART,
        )
        _store(out, total, weights, slots, block, num_routes, D, PART)
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
    num_routes,
    token_stride,
    head_stride,
    HEADS: gl.constexpr,
    TOP_K: gl.constexpr,
    D: gl.constexpr,
    F: gl.constexpr,
    BLOCK_F: gl.constexpr,
    GATE_SLOTS: gl.constexpr,
    DOWN_SLOTS: gl.constexpr,
):
    """As `fused_experts_kernel`, in blocks of 128 rows, D and F whole numbers of tiles.

    The weights are descriptors of [experts * D, F] in blocks [D, BLOCK_F], and of [experts * F, D]
    in blocks [BLOCK_F, D].
    """
    dtype: gl.constexpr = x.dtype.element_ty
    rows = gl.allocate_shared_memory(
        dtype, [2, HALF, D], gl.NVMMASharedLayout.get_default_for([HALF, D], dtype)
    )
    gates = gl.allocate_shared_memory(dtype, [GATE_SLOTS, D, BLOCK_F], w_gate.layout)
    ups = gl.allocate_shared_memory(dtype, [GATE_SLOTS, D, BLOCK_F], w_up.layout)
    downs = gl.allocate_shared_memory(dtype, [DOWN_SLOTS, BLOCK_F, D], w_down.layout)
    one: gl.constexpr = mbarrier.MBarrierLayout()
    gate_ready = gl.allocate_shared_memory(gl.int64, [GATE_SLOTS, 1], one)
    gate_free = gl.allocate_shared_memory(gl.int64, [GATE_SLOTS, 1], one)
    down_ready = gl.allocate_shared_memory(gl.int64, [DOWN_SLOTS, 1], one)
    down_free = gl.allocate_shared_memory(gl.int64, [DOWN_SLOTS, 1], one)
    for i in gl.static_range(GATE_SLOTS):
        mbarrier.init(gate_ready.index(i), count=1)
        mbarrier.init(gate_free.index(i), count=2)
    for i in gl.static_range(DOWN_SLOTS):
        mbarrier.init(down_ready.index(i), count=1)
        mbarrier.init(down_free.index(i), count=2)
    fence_async_shared()
    num_blocks = gl.load(padded_total) // (2 * HALF)
    rings = (gates, ups, downs, gate_ready, gate_free, down_ready, down_free)
    routed = (x, out, weights, slots, num_blocks, num_routes, token_stride, head_stride)
    weights_of = (w_gate, w_up, w_down)
    gl.warp_specialize(
        [
            (
                _multiply,
                (rows, rings, routed, HEADS, TOP_K, D, F, BLOCK_F, GATE_SLOTS, DOWN_SLOTS, 0),
            ),
            (
                _multiply,
                (rows, rings, routed, HEADS, TOP_K, D, F, BLOCK_F, GATE_SLOTS, DOWN_SLOTS, 1),
            ),
            (
                _fetch_gates,
                (weights_of, rings, block_expert, num_blocks, D, F, BLOCK_F, GATE_SLOTS),
            ),
            (
                _fetch_downs,
                (weights_of, rings, block_expert, num_blocks, D, F, BLOCK_F, DOWN_SLOTS),
            ),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )


def bank_descriptor(bank: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Tiles [rows, columns] of a bank [experts, ROWS, COLUMNS], its experts below one another."""
    dtype = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[bank.dtype]
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
    return TensorDescriptor.from_tensor(bank.flatten(0, 1), [rows, columns], layout)
