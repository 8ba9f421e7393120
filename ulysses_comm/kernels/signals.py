# ruff: noqa: N803
"""Signals between GPUs: 64-bit words that one rank stores into another's memory.

A word holds the number of the exchange (32 bits), the receive slot (8) and a digest of the layout
(23). Numbers are compared by their difference, so that they may wrap around. A rank that waits too
long, or sees another layout, writes down what happened where the host can read it, and traps.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

# What a report says happened; `symmetric/report.py` has the words for it.
NOT_READY = tl.constexpr(1)
LAYOUT_DIFFERS = tl.constexpr(2)
NOT_ARRIVED = tl.constexpr(3)
NOT_PACKED = tl.constexpr(4)
NOT_DONE = tl.constexpr(5)

# Between the report and the trap, which ends all programs: signals under way get out, and the host
# has read what happened.
_GRACE_NS = tl.constexpr(300_000_000)


@triton.jit
def at_address(address):
    """The words at an address."""
    return address.to(tl.pointer_type(tl.int64))


@triton.jit
def make_word(sequence, slot, digest):
    """Number, slot and digest in one word."""
    number = sequence.to(tl.int64) & 0xFFFFFFFF
    return number | (tl.cast(slot, tl.int64) << 32) | (tl.cast(digest, tl.int64) << 40)


@triton.jit
def announce(pads, peer, place, word):
    """Store a word in a peer's pad, after everything that this program has done before."""
    target = at_address(tl.load(pads + peer)) + place
    tl.atomic_xchg(target, word, sem="release", scope="sys")


@triton.jit
def _is_behind(seen, sequence):
    """Whether a word is of an earlier exchange: the sign of the low halves' difference, wrapped."""
    # Not as a difference of 32 bits: Triton's debug mode takes its overflow for an error.
    return (((seen - sequence) >> 31) & 1) == 1


@triton.jit
def await_word(pointer, sequence, timeout, report, stage, peer, ON_GPU: tl.constexpr):
    """Return a word of this rank's pad once it has reached `sequence`."""
    seen = tl.atomic_add(pointer, 0, sem="acquire", scope="sys")
    if _is_behind(seen, sequence):
        if ON_GPU:
            start = globaltimer()
            while _is_behind(seen, sequence):
                if globaltimer() - start > timeout:
                    _give_up(report, stage, peer, sequence, seen)
                seen = tl.atomic_add(pointer, 0, sem="acquire", scope="sys")
        else:
            while _is_behind(seen, sequence):
                seen = tl.atomic_add(pointer, 0, sem="acquire", scope="sys")
    return seen


@triton.jit
def check_digest(seen, digest, sequence, report, stage, peer, ON_GPU: tl.constexpr):
    """Trap if a peer means another layout, before anything is written to it."""
    differs = (seen >> 40) != digest
    if ON_GPU:
        if differs:
            _give_up(report, stage, peer, sequence, seen)
    else:
        tl.device_assert(differs == 0, "the ranks mean different exchanges")


@triton.jit
def _give_up(report, stage, peer, sequence, seen):
    tl.store(report + 1, tl.cast(peer, tl.int64))
    tl.store(report + 2, sequence.to(tl.int64))
    tl.store(report + 3, seen)
    _fence()
    # Last: the host reads the rest once this is not zero.
    tl.store(report, tl.cast(stage, tl.int64))
    _fence()
    start = globaltimer()
    while globaltimer() - start < _GRACE_NS:
        pass
    _trap()


@triton.jit
def _fence():
    tl.inline_asm_elementwise(
        "fence.acq_rel.sys; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _trap():
    tl.inline_asm_elementwise(
        "trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["rank", "ring", "timeout"])
def begin_kernel(pad, words, report, rank, ring, timeout, WORLD: tl.constexpr,
                 RING: tl.constexpr, ON_GPU: tl.constexpr):  # fmt: skip
    """Wait until a send buffer may be written: all ranks are done with its last use.

    One program, before the pack. `words + 2 + ring` counts the uses begun, `words + 2 + RING +
    ring` those that this rank has read out.
    """
    begun = tl.load(words + 2 + ring)
    await_word(words + 2 + RING + ring, begun, timeout, report, NOT_DONE, rank, ON_GPU)
    for step in tl.static_range(1, WORLD):
        peer = (rank + step) % WORLD
        place = pad + (2 + 2 * ring + 1) * WORLD + peer
        await_word(place, begun, timeout, report, NOT_DONE, peer, ON_GPU)


@triton.jit(do_not_specialize=["base", "step", "own", "rank", "ring", "timeout"])
def open_send_kernel(pad, words, report, addresses, base, step, own, rank, ring, timeout,
                     WORLD: tl.constexpr, RING: tl.constexpr, ON_GPU: tl.constexpr):  # fmt: skip
    """Wait as `begin_kernel` does, and write down where a kernel of the user's may store.

    One warp, before that kernel. Rank r's rows go `r * step` bytes after `base`, in the send
    buffer, and this rank's own to `own`, in its receive buffer.
    """
    begin_kernel(pad, words, report, rank, ring, timeout, WORLD, RING, ON_GPU)
    for target in tl.static_range(WORLD):
        block = tl.cast(base, tl.int64) + target * tl.cast(step, tl.int64)
        tl.store(addresses + target, tl.where(rank == target, tl.cast(own, tl.int64), block))


@triton.jit(do_not_specialize=["rank", "ring", "digest"])
def packed_kernel(pads, words, rank, ring, digest, WORLD: tl.constexpr):
    """Tell the peers that a send buffer is written; after the pack, in the order of the stream."""
    use = tl.load(words + 2 + ring) + 1
    for step in tl.static_range(1, WORLD):
        announce(
            pads, (rank + step) % WORLD, (2 + 2 * ring) * WORLD + rank, make_word(use, 0, digest)
        )
    tl.store(words + 2 + ring, use)


@triton.jit(do_not_specialize=["rank", "ring", "digest", "timeout"])
def await_kernel(pad, words, report, rank, ring, digest, timeout, WORLD: tl.constexpr,
                 RING: tl.constexpr, ON_GPU: tl.constexpr):  # fmt: skip
    """Wait until the peers' send buffers are written; one warp, before the copies."""
    use = tl.load(words + 2 + RING + ring) + 1
    for step in tl.static_range(1, WORLD):
        peer = (rank + step) % WORLD
        place = pad + (2 + 2 * ring) * WORLD + peer
        seen = await_word(place, use, timeout, report, NOT_PACKED, peer, ON_GPU)
        check_digest(seen, digest, use, report, LAYOUT_DIFFERS, peer, ON_GPU)


@triton.jit(do_not_specialize=["rank", "ring"])
def done_kernel(pads, words, rank, ring, WORLD: tl.constexpr, RING: tl.constexpr):
    """Tell the peers that their send buffers have been read; after the copies."""
    use = tl.load(words + 2 + RING + ring) + 1
    for step in tl.static_range(1, WORLD):
        announce(
            pads, (rank + step) % WORLD, (2 + 2 * ring + 1) * WORLD + rank, make_word(use, 0, 0)
        )
    tl.atomic_xchg(words + 2 + RING + ring, use, sem="release", scope="sys")


@triton.jit(do_not_specialize=["offset", "rank", "slot", "digest", "timeout"])
def open_kernel(bases, pads, pad, words, report, addresses, offset, rank, slot, digest, timeout,
                WORLD: tl.constexpr, ON_GPU: tl.constexpr):  # fmt: skip
    """Tell the peers where they may write, and write down where this rank may, once they tell.

    One warp, before the kernels that store. `addresses` gets, for each rank, that of its slot plus
    `offset` bytes. The kernels that follow on the stream store after this one is over, and with it
    after the peers' words were acquired.
    """
    sequence = tl.load(words) + 1
    word = make_word(sequence, slot, digest)
    for step in tl.static_range(1, WORLD):
        announce(pads, (rank + step) % WORLD, rank, word)
    tl.store(addresses + rank, tl.load(bases + slot * WORLD + rank) + offset)
    for step in tl.static_range(1, WORLD):
        peer = (rank + step) % WORLD
        seen = await_word(pad + peer, sequence, timeout, report, NOT_READY, peer, ON_GPU)
        check_digest(seen, digest, sequence, report, LAYOUT_DIFFERS, peer, ON_GPU)
        into = (seen >> 32) & 255
        tl.store(addresses + peer, tl.load(bases + into * WORLD + peer) + offset)


@triton.jit(do_not_specialize=["rank", "slot", "digest", "timeout"])
def close_kernel(pads, pad, words, report, rank, slot, digest, timeout,
                 WORLD: tl.constexpr, ON_GPU: tl.constexpr):  # fmt: skip
    """Tell the peers that this rank's part is there, wait for theirs, and count the exchange.

    One warp, after the kernels that stored. Their end synchronizes with the start of this one (PTX,
    memory consistency model, API synchronization), and a release is cumulative: whoever acquires
    the word sees all that came before it in causality order, the stores of those kernels' threads
    into peers' memory among them. No further fence is needed; the release is one of system scope.
    """
    sequence = tl.load(words) + 1
    word = make_word(sequence, slot, digest)
    for step in tl.static_range(1, WORLD):
        announce(pads, (rank + step) % WORLD, WORLD + rank, word)
    for step in tl.static_range(1, WORLD):
        peer = (rank + step) % WORLD
        await_word(pad + WORLD + peer, sequence, timeout, report, NOT_ARRIVED, peer, ON_GPU)
    tl.store(words, sequence)
