"""One case of the benchmark: its tensors on each rank, and what every way has to return."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from benchmarks.peers.way import OUTPUT, QKV, Exchange, Way
from ulysses_comm import pack_head_shards

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Case:
    """What is exchanged.

    Attributes:
        dtype: "fp32" or "bf16".
        split_sizes: Tokens of each rank.
        heads: Of q, k and v each, over all ranks.
        head_dim: Channels of a head.
        backward: Whether gradients are sent back too.
    """

    dtype: str
    split_sizes: tuple[int, ...]
    heads: int
    head_dim: int
    backward: bool

    @property
    def world_size(self) -> int:
        return len(self.split_sizes)

    @property
    def is_even(self) -> bool:
        return len(set(self.split_sizes)) == 1

    @property
    def name(self) -> str:
        splits = "even" if self.is_even else "uneven"
        direction = "forward and backward" if self.backward else "forward"
        return f"W {self.world_size}, {self.dtype}, {splits}, {direction}"


def split_sizes(world_size: int, tokens: int, *, even: bool) -> tuple[int, ...]:
    """Return `tokens` a rank; uneven: up to an eighth more or fewer, as many in all."""
    sizes = [tokens] * world_size
    if not even:
        # The sum stays a multiple of world_size: libraries that pad it then have nothing to pad.
        sizes[0] += tokens // 8
        sizes[-1] -= tokens // 8
        for rank in range(1, world_size // 2):
            sizes[rank] += 1
            sizes[-1 - rank] -= 1
    return tuple(sizes)


@dataclass(frozen=True)
class RankTensors:
    """Inputs, gradients of the results, and what has to come out, for one exchange on one rank.

    All are (tokens, heads, head_dim). `gradients` are those of the results; they and
    `input_gradients` are empty for a case without backward.
    """

    world_size: int
    inputs: list[torch.Tensor]
    gradients: list[torch.Tensor]
    results: list[torch.Tensor]
    input_gradients: list[torch.Tensor]

    def shaped_for(self, way: Way, backward: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return inputs and result gradients in the layout that a way takes, ready to be timed."""
        inputs = [tensor.detach().requires_grad_(backward) for tensor in self.inputs]
        gradients = list(self.gradients)
        if way.takes == "shards":
            return pack_head_shards(inputs, self.world_size), gradients
        if way.takes == "bshd":
            inputs = [t.detach().unsqueeze(0).requires_grad_(backward) for t in inputs]
            gradients = [gradient.unsqueeze(0) for gradient in gradients]
        return inputs, gradients

    def check(
        self, results: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor] | None
    ) -> None:
        """Compare every bit of what a way returned.

        Raises:
            AssertionError: If anything differs; says what.
        """
        _expect("result", results, self.results)
        if gradients is not None:
            _expect("gradient", gradients, self.input_gradients)


class World:
    """The tensors of all ranks of a case, made the same way on each of them."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._dtype = DTYPES[case.dtype]

    def of_rank(self, exchange: Exchange, rank: int) -> RankTensors:
        """Return what a rank has, gets and has to return."""
        case = self.case
        count = 3 if exchange == QKV else 1
        local: list[torch.Tensor] = []
        local_sent: list[torch.Tensor] = []
        gathered: list[torch.Tensor] = []
        gathered_sent: list[torch.Tensor] = []
        if exchange == QKV or case.backward:
            for i in range(count):
                of_ranks = [self._local(i, r, exchange) for r in self._ranks]
                local.append(of_ranks[rank])
                local_sent.append(torch.cat([self._heads_of(t, rank) for t in of_ranks]))
        if exchange == OUTPUT or case.backward:
            for i in range(count):
                of_ranks = [self._gathered(i, r, exchange) for r in self._ranks]
                gathered.append(of_ranks[rank])
                parts = [t.split(case.split_sizes)[rank] for t in of_ranks]
                gathered_sent.append(torch.cat(parts, dim=1))
        if exchange == QKV:
            return RankTensors(case.world_size, local, gathered, local_sent, gathered_sent)
        return RankTensors(case.world_size, gathered, local, gathered_sent, local_sent)

    @cached_property
    def _ranks(self) -> range:
        return range(self.case.world_size)

    def _heads_of(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        return tensor.unflatten(1, (self.case.world_size, -1))[:, rank]

    def _local(self, index: int, rank: int, exchange: Exchange) -> torch.Tensor:
        shape = (self.case.split_sizes[rank], self.case.heads, self.case.head_dim)
        return self._random(shape, f"local {exchange} {index} {rank}")

    def _gathered(self, index: int, rank: int, exchange: Exchange) -> torch.Tensor:
        case = self.case
        shape = (sum(case.split_sizes), case.heads // case.world_size, case.head_dim)
        return self._random(shape, f"gathered {exchange} {index} {rank}")

    def _random(self, shape: tuple[int, ...], name: str) -> torch.Tensor:
        # Random bits rather than random numbers: moves have to keep NaN and subnormals too.
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        integers = torch.int32 if self._dtype.itemsize == 4 else torch.int16
        limits = torch.iinfo(integers)
        bits = torch.randint(limits.min, limits.max, shape, dtype=integers, generator=generator)
        return bits.view(self._dtype)


def probe_of(case: Case) -> Case:
    """The same case with few tokens, where the question is only whether it runs."""
    few = tuple(max(1, size // 16) for size in case.split_sizes)
    return replace(case, split_sizes=few)


def _expect(what: str, found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    assert len(found) == len(expected), f"{len(found)} {what}s, expected {len(expected)}"
    for index, (tensor, wanted) in enumerate(zip(found, expected, strict=True)):
        tensor = tensor.detach()
        named = f"{what} {index}"
        assert tensor.dtype == wanted.dtype, f"{named} is {tensor.dtype}, expected {wanted.dtype}"
        assert tensor.numel() == wanted.numel(), (
            f"{named} is {tuple(tensor.shape)}, expected {tuple(wanted.shape)}"
        )
        # A leading axis of one and head shards are other shapes of the same order of elements.
        bits = tensor.reshape(wanted.shape).contiguous().view(torch.uint8)
        same = torch.equal(bits, wanted.contiguous().view(torch.uint8))
        assert same, f"the bits of {named} are not the expected ones"
