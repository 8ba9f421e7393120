"""A kernel that stores q, k and v where an opened exchange wants them, and does nothing else."""

import triton
import triton.language as tl


@triton.jit
def _store(source, target, offsets, targets, mask):
    tl.store(target + targets, tl.load(source + offsets, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def store_rows_kernel(
    q,
    k,
    v,
    addresses,
    tokens,
    row,
    step,
    PART: tl.constexpr,
    ROWS: tl.constexpr,
    PIECE: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Copy a block of tokens for one rank; program (block, rank).

    Args:
        q: Elements, `row` from token to token and `step` from one rank's first head to the next's.
        k: Likewise.
        v: Likewise.
        addresses: For each rank, where its rows begin: dense, PART elements of each input.
        tokens: Of this rank.
        row: See above.
        step: See above.
        PART: Elements of one input that a rank gets of each token.
        ROWS: Tokens of a program.
        PIECE: PART, rounded up to a power of two.
        ALIGN: Bytes that divide every address.
    """
    rank = tl.program_id(1)
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    element = tl.arange(0, PIECE)[None, :]
    mask = (token < tokens) & (element < PART)
    target = tl.load(addresses + rank).to(tl.pointer_type(q.dtype.element_ty))
    target = tl.multiple_of(target, ALIGN)
    offsets = token * row + rank * step + element
    targets = token * (3 * PART) + element
    _store(q, target, offsets, targets, mask)
    _store(k, target, offsets, targets + PART, mask)
    _store(v, target, offsets, targets + 2 * PART, mask)
