# ruff: noqa: N803, N806
"""One launch that reads the inputs where they lie and stores them into every rank's memory.

What moves is a list of rectangles: `rows` rows of `length` bytes, a row apart by one stride where
they are read and by another where they are written, one for each destination and column (a piece of
one input's part of a row). The table holds them, FIELDS numbers each, [destination][column]:

    input, source, source_row, destination, destination_row, length, rows

Offsets, strides and lengths count groups of GROUP bytes, the widest access that all of them allow.
A tile is ROWS rows of one rectangle. Programs take tiles in turn; neighbours serve other
destinations, so that the links and this rank's own memory are busy at the same time.

Around the move stands the protocol of docs/nvlink.md: this rank's program 0 tells the peers where
they may write, every program waits until its peers have done so too, and the last one to finish
tells them that the data is there and waits for theirs. Then the launch is over, and in the order of
the stream the receive slot holds what was sent.
"""

import triton
import triton.language as tl

from ulysses_comm.kernels.signals import (
    LAYOUT_DIFFERS,
    NOT_ARRIVED,
    NOT_READY,
    announce,
    await_word,
    check_digest,
    make_word,
)

MAX_INPUTS = 8
FIELDS = 7

_NUMBERS = [f"source{i}" for i in range(MAX_INPUTS)]
_COUNTS = ["columns", "total", "rank", "slot", "digest", "timeout", "own", "others"]


@triton.jit
def _select(
    which,
    source0,
    source1,
    source2,
    source3,
    source4,
    source5,
    source6,
    source7,
    INPUTS: tl.constexpr,
):
    """The address of one input."""
    source = source0
    if INPUTS > 1:
        source = tl.where(which == 1, source1, source)
    if INPUTS > 2:
        source = tl.where(which == 2, source2, source)
    if INPUTS > 3:
        source = tl.where(which == 3, source3, source)
    if INPUTS > 4:
        source = tl.where(which == 4, source4, source)
    if INPUTS > 5:
        source = tl.where(which == 5, source5, source)
    if INPUTS > 6:
        source = tl.where(which == 6, source6, source)
    if INPUTS > 7:
        source = tl.where(which == 7, source7, source)
    return source


@triton.jit
def _as_words(address, WORD: tl.constexpr, GROUP: tl.constexpr):
    """A pointer to words of WORD bytes at an address that GROUP divides."""
    if WORD == 8:
        pointer = address.to(tl.pointer_type(tl.int64))
    elif WORD == 4:
        pointer = address.to(tl.pointer_type(tl.int32))
    elif WORD == 2:
        pointer = address.to(tl.pointer_type(tl.int16))
    else:
        pointer = address.to(tl.pointer_type(tl.int8))
    return tl.multiple_of(pointer, GROUP)


@triton.jit
def _place(index, programs, columns, rank, WORLD: tl.constexpr):
    """Destination, column and row block of a tile; each program's destinations alternate."""
    turn = index % WORLD + index // programs
    destination = (rank + 1 + turn) % WORLD
    rest = index // WORLD
    return destination, rest % columns, rest // columns


@triton.jit
def _move(
    entry,
    source,
    target,
    block,
    WORD: tl.constexpr,
    VEC: tl.constexpr,
    ROWS: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Copy one tile: loads first, then stores; the table's offsets become words by VEC."""
    GROUP: tl.constexpr = WORD * VEC
    source_offset = tl.load(entry + 1)
    source_row = tl.load(entry + 2)
    target_offset = tl.load(entry + 3)
    target_row = tl.load(entry + 4)
    length = tl.load(entry + 5)
    rows = tl.load(entry + 6)
    row = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    word = tl.arange(0, PIECE * VEC)[None, :]
    mask = (row < rows) & (word < length * VEC)
    read = _as_words(source + source_offset * GROUP, WORD, GROUP)
    written = _as_words(target + target_offset * GROUP, WORD, GROUP)
    value = tl.load(read + (row * source_row * VEC + word), mask=mask)
    tl.store(written + (row * target_row * VEC + word), value, mask=mask)


@triton.jit(do_not_specialize=[*_NUMBERS, *_COUNTS])
def pack_kernel(
    source0,
    source1,
    source2,
    source3,
    source4,
    source5,
    source6,
    source7,
    table,
    own,
    others,
    columns,
    total,
    rank,
    WORLD: tl.constexpr,
    INPUTS: tl.constexpr,
    WORD: tl.constexpr,
    VEC: tl.constexpr,
    ROWS: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Move into memory of this rank alone: its own part to `own`, the others' to `others`."""
    programs = tl.num_programs(0)
    index = tl.program_id(0)
    while index < total:
        destination, column, block = _place(index, programs, columns, rank, WORLD)
        entry = table + (destination * columns + column) * 7
        source = _select(
            tl.load(entry), source0, source1, source2, source3, source4, source5, source6, source7,
            INPUTS,
        )  # fmt: skip
        target = tl.where(destination == rank, own, others)
        _move(entry, source, target, block, WORD, VEC, ROWS, PIECE)
        index += programs


@triton.jit(do_not_specialize=[*_NUMBERS, *_COUNTS])
def push_kernel(
    source0,
    source1,
    source2,
    source3,
    source4,
    source5,
    source6,
    source7,
    table,
    bases,
    pads,
    pad,
    words,
    report,
    columns,
    total,
    rank,
    slot,
    digest,
    timeout,
    WORLD: tl.constexpr,
    INPUTS: tl.constexpr,
    WORD: tl.constexpr,
    VEC: tl.constexpr,
    ROWS: tl.constexpr,
    PIECE: tl.constexpr,
    ON_GPU: tl.constexpr,
):
    """Move into every rank's receive slot, and be over once everybody's part is in this rank's.

    Args:
        source0: Address of an input, or of anything.
        source1: Likewise.
        source2: Likewise.
        source3: Likewise.
        source4: Likewise.
        source5: Likewise.
        source6: Likewise.
        source7: Likewise.
        table: What to move, see above.
        bases: `[slots, WORLD]` addresses of all ranks' receive slots.
        pads: `[WORLD]` addresses of all ranks' signal pads.
        pad: This rank's own signal pad.
        words: This rank's counters: exchanges done, programs done.
        report: Where a failure is written down before the trap.
        columns: Columns of the table.
        total: Tiles.
        rank: This rank.
        slot: Where this rank receives.
        digest: Of what all ranks have to agree on.
        timeout: Nanoseconds to wait for a peer.
        WORLD: Ranks.
        INPUTS: Inputs.
        WORD: Bytes of a word.
        VEC: Words of one access.
        ROWS: Rows of a tile.
        PIECE: Groups of a tile's row.
        ON_GPU: Whether this is a GPU, not the interpreter.
    """
    programs = tl.num_programs(0)
    sequence = tl.load(words) + 1
    if tl.program_id(0) == 0:
        word = make_word(sequence, slot, digest)
        for step in tl.static_range(1, WORLD):
            announce(pads, (rank + step) % WORLD, rank, word)
    for step in tl.static_range(1, WORLD):
        peer = (rank + step) % WORLD
        seen = await_word(pad + peer, sequence, timeout, report, NOT_READY, peer, ON_GPU)
        check_digest(seen, digest, sequence, report, LAYOUT_DIFFERS, peer, ON_GPU)
    tl.debug_barrier()
    index = tl.program_id(0)
    while index < total:
        destination, column, block = _place(index, programs, columns, rank, WORLD)
        entry = table + (destination * columns + column) * 7
        source = _select(
            tl.load(entry), source0, source1, source2, source3, source4, source5, source6, source7,
            INPUTS,
        )  # fmt: skip
        # The peer's word cannot change before this rank has said that its data is there.
        theirs = (tl.load(pad + destination) >> 32) & 255
        into = tl.where(destination == rank, slot, theirs)
        target = tl.load(bases + into * WORLD + destination)
        _move(entry, source, target, block, WORD, VEC, ROWS, PIECE)
        index += programs
    # All threads' stores come before the ticket, and with it before the last program's signals.
    tl.debug_barrier()
    done = tl.atomic_add(words + 1, 1, sem="acq_rel", scope="sys")
    if done == programs - 1:
        word = make_word(sequence, slot, digest)
        for step in tl.static_range(1, WORLD):
            announce(pads, (rank + step) % WORLD, WORLD + rank, word)
        for step in tl.static_range(1, WORLD):
            peer = (rank + step) % WORLD
            await_word(pad + WORLD + peer, sequence, timeout, report, NOT_ARRIVED, peer, ON_GPU)
        tl.store(words + 1, 0)
        tl.store(words, sequence)
