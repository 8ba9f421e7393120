"""The sum over a token's choices in each head, in a stated order.

Row `r` of the result adds rows `r * TOP_K + k` of the routes. The order is a contract: ascending k
in float32 with one rounding, or ascending expert with a rounding after every addition. Both start
from zero, as the reference does, so that a lone -0.0 becomes 0.0.
"""

import triton
import triton.language as tl

from magi2.kernels.expert_blocks import narrow, widen


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def sum_routes_kernel(
    routes,
    choice,
    out,
    num_rows,
    num_tokens,
    HEADS: tl.constexpr,
    TOP_K: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BY_EXPERT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Routes [num_rows, TOP_K, D] to out [num_rows, D]; row = token * HEADS + head.

    choice is (HEADS, num_tokens, TOP_K) and read only where BY_EXPERT.
    """
    # int64: row * TOP_K * D passes 2**31 at a million routes of 2048 channels.
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    live = row < num_rows
    inside = live[:, None] & (columns < D)[None, :]
    total = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    chosen = choice + ((row % HEADS) * num_tokens + row // HEADS) * TOP_K
    for step in tl.static_range(TOP_K):
        k = tl.zeros((BLOCK_R,), tl.int64) + step
        if BY_EXPERT:
            # The choice that has `step` smaller experts beside it; equal ones count in order.
            for i in tl.static_range(TOP_K):
                mine = tl.load(chosen + i, mask=live, other=0)
                smaller = tl.zeros((BLOCK_R,), tl.int32)
                for j in tl.static_range(TOP_K):
                    other = tl.load(chosen + j, mask=live, other=0)
                    before = (other < mine) | ((other == mine) & (j < i))
                    smaller += before.to(tl.int32)
                k = tl.where(smaller == step, i, k)
        address = routes + ((row * TOP_K + k) * D)[:, None] + columns[None, :]
        total += widen(tl.load(address, mask=inside, other=0.0), INTERPRETED)
        if BY_EXPERT:
            total = widen(narrow(total, out.dtype.element_ty, INTERPRETED), INTERPRETED)
    address = out + (row * D)[:, None] + columns[None, :]
    tl.store(address, narrow(total, out.dtype.element_ty, INTERPRETED), mask=inside)
