"""How the inputs of one exchange lie on the wire, before and after it.

Both exchanges move the same rows: for each token and rank, the heads that the rank owns, of every
input, one input after another.

- Scattered: what one rank holds of its own tokens for all ranks. Blocks in rank order, block r is
  (tokens of this rank, row of rank r). It is the send buffer of the Q/K/V exchange and the receive
  buffer of the output exchange.
- Gathered: what one rank holds of all tokens for itself, (seqlen, its own row). It is the receive
  buffer of the Q/K/V exchange and the send buffer of the output exchange.

Where every rank owns equally many heads, the scattered buffer is (world_size, tokens, heads,
head_dim), and an input in it is one strided view: its head shards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch

from ulysses_comm.head_split import HeadSplit

FunctionT = TypeVar("FunctionT", bound=Callable[..., object])


def _remembered(maxsize: int) -> Callable[[FunctionT], FunctionT]:
    """Keep the results of a pure function, to save arithmetic; a trace would warn of a cache."""

    def decorate(function: FunctionT) -> FunctionT:
        cached = functools.lru_cache(maxsize)(function)

        @functools.wraps(function)
        def call(*args: object) -> object:
            return function(*args) if torch.compiler.is_compiling() else cached(*args)

        return call  # type: ignore[return-value]  # of the same signature

    return decorate


class Run(NamedTuple):
    """Neighbouring ranks whose shares of one input form one strided view.

    Attributes:
        ranks: The ranks [first, last).
        first_head: First head that the first of them owns.
        head_step: Heads from one rank's first head to the next one's; zero if all own the same.
        num_heads: Heads that each of them owns.
    """

    ranks: tuple[int, int]
    first_head: int
    head_step: int
    num_heads: int

    @property
    def num_ranks(self) -> int:
        """Ranks of the run."""
        return self.ranks[1] - self.ranks[0]

    def of_heads(self, tensor: torch.Tensor) -> torch.Tensor:
        """See the run's heads in (tokens, heads, head_dim) as (tokens, ranks, num_heads, ·)."""
        if self.head_step == 0:
            heads = tensor.narrow(1, self.first_head, self.num_heads)
            return heads.unsqueeze(1).expand(-1, self.num_ranks, -1, -1)
        heads = tensor
        if tensor.shape[1] != self.num_ranks * self.num_heads:
            heads = tensor.narrow(1, self.first_head, self.num_ranks * self.num_heads)
        shares: torch.Tensor = heads.unflatten(1, (self.num_ranks, self.num_heads))
        return shares


@dataclass(frozen=True)
class Wire:
    """The layout of one exchange.

    Attributes:
        dtypes: What each input travels as.
        head_dims: Channels of a head of each input.
        splits: Which heads of each input each rank owns.
        dtype: Of the buffers: the inputs' own if they share one dtype and head_dim, else bytes.
        offsets: First element of each input in the row of each rank, [rank][input].
        row_sizes: Elements in the row of each rank.
        is_uniform: Whether all inputs share one dtype and head_dim, so that buffers have heads.
        is_even: Whether every rank owns equally many heads of each input, none of them shared.
        rows_are_alike: Whether the rows of all ranks have the same length, so that tokens can be
            counted.
    """

    dtypes: tuple[torch.dtype, ...]
    head_dims: tuple[int, ...]
    splits: tuple[HeadSplit, ...]
    dtype: torch.dtype
    offsets: tuple[tuple[int, ...], ...]
    row_sizes: tuple[int, ...]
    # These follow from the others; every exchange asks for them, so they are worked out once.
    is_uniform: bool = field(compare=False)
    is_even: bool = field(compare=False)
    rows_are_alike: bool = field(compare=False)

    @property
    def world_size(self) -> int:
        """Ranks of the exchange."""
        return len(self.row_sizes)

    def scattered_shape(self, tokens: int) -> tuple[int, ...]:
        """Shape of a scattered buffer: (world_size, tokens, ...) if rows are alike, else flat."""
        if self.rows_are_alike:
            return (self.world_size, tokens, *self.row_shape(0))
        return (tokens * sum(self.row_sizes),)

    def block(self, buffer: torch.Tensor, tokens: int, rank: int) -> torch.Tensor:
        """See the rows of one rank in a scattered buffer as (tokens, elements)."""
        start, row = tokens * sum(self.row_sizes[:rank]), self.row_sizes[rank]
        return buffer.reshape(-1)[start : start + tokens * row].view(tokens, row)

    def row_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of one row of a rank: (heads, head_dim), or (bytes,)."""
        if self.is_uniform:
            return (self.row_sizes[rank] // self.head_dims[0], self.head_dims[0])
        return (self.row_sizes[rank],)

    def of_inputs(self, indices: Sequence[int]) -> Wire:
        """Return the layout of some of the inputs alone."""
        if list(indices) == list(range(len(self.splits))):
            return self
        return plan_wire(
            tuple(self.dtypes[i] for i in indices),
            tuple(self.head_dims[i] for i in indices),
            tuple(self.splits[i] for i in indices),
        )

    def gathered(self, buffer: torch.Tensor, rank: int) -> list[torch.Tensor]:
        """See each input in a gathered buffer (seqlen, ...) as (seqlen, heads of the rank, ·)."""
        row, seqlen = self.row_sizes[rank], buffer.shape[0]
        views = []
        for index, split in enumerate(self.splits):
            start, stop = split.ranges[rank]
            offset = self.offsets[rank][index]
            views.append(self._view(buffer, index, offset, (seqlen, stop - start), (row,)))
        return views

    def scattered(
        self, buffer: torch.Tensor, tokens: int, index: int
    ) -> list[tuple[Run, torch.Tensor]]:
        """See one input in a scattered buffer as (tokens, ranks, heads per rank, ·)."""
        whole = self._whole_run(index)
        if whole and self.is_uniform and len(self.splits) == 1:
            return [(whole[0], buffer.transpose(0, 1))]
        views = []
        for run in whole or runs(self, index):
            first = run.ranks[0]
            row = self.row_sizes[first]
            offset = tokens * sum(self.row_sizes[:first]) + self.offsets[first][index]
            shape = (tokens, run.num_ranks, run.num_heads)
            views.append((run, self._view(buffer, index, offset, shape, (row, tokens * row))))
        return views

    def gaps(self, rank: int) -> list[tuple[int, int]]:
        """Elements [start, stop) of a rank's row that alignment leaves unused."""
        ends = [
            offset + split.counts[rank] * self._head_size(index)
            for index, (offset, split) in enumerate(
                zip(self.offsets[rank], self.splits, strict=True)
            )
        ]
        starts = [*self.offsets[rank][1:], self.row_sizes[rank]]
        return [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]

    def _whole_run(self, index: int) -> tuple[Run, ...]:
        """Return the one run of an even split, or nothing: the common case needs no search."""
        start, stop = self.splits[index].ranges[0]
        return (Run((0, self.world_size), start, stop, stop),) if self.is_even and stop else ()

    def _head_size(self, index: int) -> int:
        """Buffer elements that one head of an input takes."""
        return self.head_dims[index] * self.dtypes[index].itemsize // self.dtype.itemsize

    def _view(
        self,
        buffer: torch.Tensor,
        index: int,
        offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
    ) -> torch.Tensor:
        """See (*shape, head_dim) of an input; `offset` and `strides` count buffer elements."""
        ratio = self.dtypes[index].itemsize // self.dtype.itemsize
        head_dim = self.head_dims[index]
        typed = buffer
        if buffer.dtype != self.dtypes[index]:
            typed = buffer.reshape(-1).view(self.dtypes[index])
        return typed.as_strided(
            (*shape, head_dim),
            (*(stride // ratio for stride in strides), head_dim, 1),
            typed.storage_offset() + offset // ratio,
        )


@_remembered(maxsize=512)
def plan_wire(
    dtypes: tuple[torch.dtype, ...], head_dims: tuple[int, ...], splits: tuple[HeadSplit, ...]
) -> Wire:
    """Lay out an exchange.

    Inputs of one dtype and head_dim lie side by side as heads. Others lie in rows of bytes, each
    aligned to its own element size, every row of a length that keeps the next row aligned too.
    """
    uniform = len(set(dtypes)) == 1 and len(set(head_dims)) == 1
    dtype = dtypes[0] if uniform else torch.uint8
    alignment = max(d.itemsize for d in dtypes) // dtype.itemsize
    offsets, row_sizes = [], []
    for rank in range(splits[0].world_size):
        starts, end = [], 0
        for d, head_dim, split in zip(dtypes, head_dims, splits, strict=True):
            ratio = d.itemsize // dtype.itemsize
            starts.append(_round_up(end, ratio))
            end = starts[-1] + split.counts[rank] * head_dim * ratio
        offsets.append(tuple(starts))
        row_sizes.append(_round_up(end, alignment))
    return Wire(
        dtypes,
        head_dims,
        splits,
        dtype,
        tuple(offsets),
        tuple(row_sizes),
        is_uniform=uniform,
        is_even=all(split.is_even for split in splits),
        rows_are_alike=len(set(row_sizes)) == 1,
    )


@_remembered(maxsize=2048)
def runs(wire: Wire, index: int) -> tuple[Run, ...]:
    """Cut the ranks into runs for one input, as long as possible; ranks without a head fall out."""
    split = wire.splits[index]
    found: list[Run] = []
    for rank, (start, stop) in enumerate(split.ranges):
        if start == stop:
            continue
        extended = _extend(found[-1], wire, index, rank) if found else None
        if extended is None:
            found.append(Run((rank, rank + 1), start, stop - start, stop - start))
        else:
            found[-1] = extended
    return tuple(found)


def _extend(run: Run, wire: Wire, index: int, rank: int) -> Run | None:
    """Return the run with one more rank, or None if that is no strided view."""
    first, last = run.ranks
    start, stop = wire.splits[index].ranges[rank]
    step = start - wire.splits[index].ranges[last - 1][0]
    fits = (
        rank == last
        and stop - start == run.num_heads
        and step in (0, run.num_heads)
        and (run.num_ranks == 1 or step == run.head_step)
        and wire.row_sizes[rank] == wire.row_sizes[first]
        and wire.offsets[rank][index] == wire.offsets[first][index]
    )
    return Run((first, rank + 1), run.first_head, step, run.num_heads) if fits else None


@_remembered(maxsize=512)
def even_split(count: int, world_size: int) -> HeadSplit:
    """Return the split that gives each rank `count` heads, none of them shared."""
    return HeadSplit.of_counts([count] * world_size)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple if multiple > 1 else value
