"""What moves where in an exchange: rectangles of bytes, for the kernels and for copy engines.

Both directions send rows: scattering heads, a rank's tokens cut by head; scattering the sequence, a
rank's heads cut by token. What one rank sends another is one rectangle for each input, and lands as
one contiguous block of the other's receive buffer.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from ulysses_comm.wire import Wire

Direction = Literal["heads", "seqlen"]
"""What is scattered: heads (before attention) or the sequence (after it)."""

# From this width on a piece of a row is wide enough for whole lines of memory.
_SMALL_PIECE_BYTES = 256
_MOST_LANES = 4096


@dataclass(frozen=True)
class Tuning:
    """How moves are cut into work; no choice changes a bit.

    Attributes:
        programs_per_sm: Programs of a launch for each multiprocessor: enough to fill the links, few
            enough for two exchanges at a time.
        warps: Warps of a program.
        piece_bytes: Most bytes of a row that neighbouring threads move together.
        tile_bytes: Bytes that a program moves at a time.
    """

    programs_per_sm: int = 2
    warps: int = 8
    piece_bytes: int = 1024
    tile_bytes: int = 16384


DEFAULT_TUNING = Tuning()


class Layout(NamedTuple):
    """How one input lies on this rank: (tokens, heads, ·) or head shards (tokens, ranks, heads, ·).

    Attributes:
        strides: In bytes, of all dimensions but the last.
        address: Low bits of the address of its first element.
    """

    strides: tuple[int, ...]
    address: int


class Rectangle(NamedTuple):
    """Rows of one input for one destination, in bytes."""

    input: int
    source: int
    source_row: int
    target: int
    target_row: int
    length: int
    rows: int


@dataclass(frozen=True)
class Exchange:
    """The facts of an exchange that all ranks share.

    Attributes:
        direction: What is scattered.
        wire: The layout of rows.
        split_sizes: Tokens each rank owns.
    """

    direction: Direction
    wire: Wire
    split_sizes: tuple[int, ...]

    @property
    def world_size(self) -> int:
        """Ranks."""
        return len(self.split_sizes)

    def row_bytes(self, rank: int) -> int:
        """Bytes of a rank's row."""
        return self.wire.row_sizes[rank] * self.wire.dtype.itemsize

    def block_bytes(self, source: int, target: int) -> int:
        """Bytes that one rank sends another."""
        if self.direction == "heads":
            return self.split_sizes[source] * self.row_bytes(target)
        return self.split_sizes[target] * self.row_bytes(source)

    def receive_offset(self, source: int, target: int) -> int:
        """Where a source's block begins in a target's receive buffer."""
        return sum(self.block_bytes(before, target) for before in range(source))

    def send_offset(self, source: int, target: int) -> int:
        """Where a target's block begins in a source's send buffer."""
        return sum(self.block_bytes(source, before) for before in range(target))

    def receive_bytes(self, rank: int) -> int:
        """Bytes of a rank's receive buffer."""
        return self.receive_offset(self.world_size, rank)

    def send_bytes(self, rank: int) -> int:
        """Bytes of a rank's send buffer."""
        return self.send_offset(rank, self.world_size)

    def receive_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of a rank's receive buffer, as the wire sees it."""
        if self.direction == "heads":
            return (sum(self.split_sizes), *self.wire.row_shape(rank))
        return self.wire.scattered_shape(self.split_sizes[rank])


@dataclass(frozen=True)
class Agreed:
    """What follows from an `Exchange`, worked out once.

    Attributes:
        receive_bytes: Of the largest receive buffer; all ranks' slots are at least this large.
        send_bytes: Of the largest send buffer.
        digest: 23 bits that differ, most likely, where ranks mean different exchanges.
    """

    receive_bytes: int
    send_bytes: int
    digest: int


@functools.lru_cache(maxsize=2048)
def agreed(exchange: Exchange) -> Agreed:
    """Work out what all ranks have in common."""
    wire, ranks = exchange.wire, range(exchange.world_size)
    facts = (
        exchange.direction,
        exchange.split_sizes,
        [str(dtype) for dtype in wire.dtypes],
        wire.head_dims,
        [split.ranges for split in wire.splits],
    )
    return Agreed(
        receive_bytes=max(exchange.receive_bytes(rank) for rank in ranks),
        send_bytes=max(exchange.send_bytes(rank) for rank in ranks),
        digest=zlib.crc32(repr(facts).encode()) & 0x7FFFFF,
    )


def rectangles(
    exchange: Exchange, rank: int, layouts: Sequence[Layout], *, pack: bool
) -> list[list[Rectangle]]:
    """Return for each destination what this rank sends it.

    Args:
        exchange: The exchange.
        rank: This rank.
        layouts: How the inputs lie.
        pack: Whether blocks for other ranks go to this rank's send buffer, rather than to their
            receive buffers; its own part goes to its receive buffer in any case.
    """
    wire, sizes = exchange.wire, exchange.split_sizes
    found = []
    for target in range(exchange.world_size):
        row_rank = target if exchange.direction == "heads" else rank
        rows = sizes[rank] if exchange.direction == "heads" else sizes[target]
        row_bytes = exchange.row_bytes(row_rank)
        begin = (
            exchange.send_offset(rank, target)
            if pack and target != rank
            else exchange.receive_offset(rank, target)
        )
        pieces: list[Rectangle] = []
        for index, layout in enumerate(layouts):
            source, row, head, heads = _source(exchange, rank, target, index, layout)
            head_bytes = wire.head_dims[index] * wire.dtypes[index].itemsize
            place = begin + wire.offsets[row_rank][index] * wire.dtype.itemsize
            adjacent = head == head_bytes or heads <= 1
            runs, length = (1, heads * head_bytes) if adjacent else (heads, head_bytes)
            if rows == 0 or length == 0:
                continue
            pieces += [
                Rectangle(
                    index, source + run * head, row, place + run * length, row_bytes, length, rows
                )
                for run in range(runs)
            ]
        found.append(pieces)
    return found


def _source(
    exchange: Exchange, rank: int, target: int, index: int, layout: Layout
) -> tuple[int, int, int, int]:
    """Return offset, row stride, head stride and heads of what a target gets of an input."""
    split, strides = exchange.wire.splits[index], layout.strides
    if exchange.direction == "seqlen":
        first = sum(exchange.split_sizes[:target])
        return first * strides[0], strides[0], strides[1], split.counts[rank]
    if len(strides) == 3:
        return target * strides[1], strides[0], strides[2], split.counts[target]
    return split.ranges[target][0] * strides[1], strides[0], strides[1], split.counts[target]


@dataclass(frozen=True)
class Cut:
    """Rectangles cut into pieces of equal width, as the kernels take them.

    Attributes:
        table: (destinations, columns, 7) numbers, see `kernels/push.py`.
        columns: Pieces of the destination that has most.
        total: Tiles.
        word: Bytes of a word.
        vec: Words of one access.
        rows: Rows of a tile.
        piece: Groups (of word x vec bytes) of a tile's row.
    """

    table: tuple[tuple[tuple[int, ...], ...], ...]
    columns: int
    total: int
    word: int
    vec: int
    rows: int
    piece: int


def cut_moves(
    exchange: Exchange,
    rank: int,
    layouts: tuple[Layout, ...],
    *,
    pack: bool,
    programs: int,
    tuning: Tuning = DEFAULT_TUNING,
) -> Cut:
    """Cut what a rank sends into tiles.

    Args:
        exchange: The exchange.
        rank: This rank.
        layouts: How the inputs lie.
        pack: As for `rectangles`.
        programs: How many programs there should be work for.
        tuning: How large pieces and tiles are.
    """
    moves = rectangles(exchange, rank, layouts, pack=pack)
    bits = 16
    for layout in layouts:
        bits |= layout.address
    for move in itertools.chain.from_iterable(moves):
        bits |= move.source | move.source_row | move.target | move.target_row | move.length
    # The lowest bit set in any of them is the largest power of two that divides all.
    group = bits & -bits
    word = min(group, 8)
    lengths = {move.length // group for move in itertools.chain.from_iterable(moves)}
    piece = _piece(lengths, group, tuning)
    columns = [
        [part for move in target_moves for part in _columns(move, piece, group)]
        for target_moves in moves
    ]
    most = max(map(len, columns))
    table = tuple(
        tuple(parts + [(0,) * len(Rectangle._fields)] * (most - len(parts))) for parts in columns
    )
    tallest = max((move.rows for move in itertools.chain.from_iterable(moves)), default=0)
    lanes = min(tuning.tile_bytes // word, _MOST_LANES)
    rows = max(1, lanes * word // (group * piece))
    if exchange.world_size * most * -(-tallest // rows) < programs:
        rows = max(1, rows // 4)  # few tokens: smaller tiles, so that all programs have work
    total = exchange.world_size * most * -(-tallest // rows)
    return Cut(table, most, total, word, group // word, rows, piece)


def _piece(lengths: set[int], group: int, tuning: Tuning) -> int:
    """Groups of a tile's row: a power of two, the one that wastes no lane if it is wide enough."""
    widest, enough = tuning.piece_bytes // group, max(1, _SMALL_PIECE_BYTES // group)
    bits = functools.reduce(int.__or__, lengths, 0)
    divisor = bits & -bits
    if divisor >= enough:
        return min(divisor, widest)
    return min(widest, 1 << (max(lengths, default=1) - 1).bit_length())


def _columns(move: Rectangle, piece: int, group: int) -> list[tuple[int, ...]]:
    """Cut one rectangle into columns, in groups."""
    in_groups = Rectangle(
        move.input,
        move.source // group,
        move.source_row // group,
        move.target // group,
        move.target_row // group,
        move.length // group,
        move.rows,
    )
    return [
        tuple(
            in_groups._replace(
                source=in_groups.source + start,
                target=in_groups.target + start,
                length=min(piece, in_groups.length - start),
            )
        )
        for start in range(0, in_groups.length, piece)
    ]


def layout_of(tensor: torch.Tensor) -> Layout:
    """Return how a tensor lies; its last dimension has to be adjacent."""
    size = tensor.element_size()
    # Where there is nothing, or one of something, strides and addresses mean nothing.
    if tensor.numel() == 0:
        return Layout((0,) * (tensor.dim() - 1), 0)
    strides = tuple(
        stride * size if extent > 1 else 0
        for stride, extent in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True)
    )
    return Layout(strides, tensor.data_ptr() & 15)
