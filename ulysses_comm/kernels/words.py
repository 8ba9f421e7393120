# ruff: noqa: N803
"""What the copy kernels share: words, their loads and stores, and a program's place in the grid."""

import triton
import triton.language as tl


@triton.jit
def as_words(pointer, WORD: tl.constexpr):
    """The same address, counted in integers of WORD bytes; 0 leaves it as it is."""
    if WORD == 8:
        pointer = pointer.to(tl.pointer_type(tl.int64), bitcast=True)
    elif WORD == 4:
        pointer = pointer.to(tl.pointer_type(tl.int32), bitcast=True)
    elif WORD == 2:
        pointer = pointer.to(tl.pointer_type(tl.int16), bitcast=True)
    elif WORD == 1:
        pointer = pointer.to(tl.pointer_type(tl.int8), bitcast=True)
    return pointer


@triton.jit
def load_words(source, offsets, mask, WORD: tl.constexpr, POLICY: tl.constexpr):
    """Words, or elements that are to change their dtype; bfloat16 comes as its bits."""
    if WORD == 0 and source.dtype.element_ty == tl.bfloat16:
        source = as_words(source, 2)
    else:
        source = as_words(source, WORD)
    return tl.load(source + offsets, mask=mask, eviction_policy=POLICY)


@triton.jit
def store_words(destination, offsets, value, mask, WORD: tl.constexpr):
    """Store what `load_words` gave; without a WORD it widens to the destination's float32."""
    if WORD > 0:
        tl.store(as_words(destination, WORD) + offsets, value, mask=mask)
    elif value.dtype == tl.int16:
        # bfloat16 is the upper half of a float32: a shift is exact and keeps NaN payloads.
        tl.store(as_words(destination, 4) + offsets, value.to(tl.int32) << 16, mask=mask)
    else:
        tl.store(destination + offsets, value.to(tl.float32), mask=mask)


@triton.jit
def program_place(
    num_tokens, world_size, ROWS: tl.constexpr, PARTS: tl.constexpr, RANKS_FIRST: tl.constexpr
):
    """First token, rank, part of this program."""
    program = tl.program_id(0)
    part = program % PARTS
    program = program // PARTS
    if RANKS_FIRST:
        rank = program % world_size
        tile = program // world_size
    else:
        tiles = tl.cdiv(num_tokens, ROWS)
        rank = program // tiles
        tile = program % tiles
    # int64: token * stride passes 2**31 elements long before memory is full.
    return tile.to(tl.int64) * ROWS, rank.to(tl.int64), part
