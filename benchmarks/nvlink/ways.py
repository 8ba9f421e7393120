"""Every way to do the two exchanges that the benchmark times, and the copy that bounds them.

T = tokens of a rank, W = ranks, S = W * T, H = heads of a rank, D = head_dim
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from benchmarks.harness import Candidate, expect_bits
from benchmarks.nvlink.groups import Groups, load_fast_ulysses
from ulysses_comm import (
    Workspace,
    pack_head_shards,
    scatter_heads_gather_seqlen,
    scatter_seqlen_gather_head_shards,
    scatter_seqlen_gather_heads,
)

FLOOR = "flat peer copy"


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is exchanged: tokens of a rank, heads of the whole model, channels of a head."""

    tokens: int
    heads: int
    head_dim: int
    dtype: torch.dtype

    def remote_bytes(self, inputs: int, world_size: int) -> int:
        """What leaves a rank in an exchange of so many tensors."""
        row = self.heads * self.head_dim * self.dtype.itemsize
        return inputs * self.tokens * row * (world_size - 1) // world_size


class QkvExchange:
    """Q, K and V of every rank, and the ways to trade tokens for heads."""

    inputs = 3

    def __init__(self, shape: Shape, groups: Groups) -> None:
        self.shape, self.groups = shape, groups
        rank, size = groups.rank, groups.size
        self.splits = [shape.tokens] * size
        whole = [
            [_values((shape.tokens, shape.heads, shape.head_dim), shape, groups.device, 10 * r + i)
             for i in range(3)] for r in range(size)
        ]  # fmt: skip
        self.own = whole[rank]
        self.packed = pack_head_shards(self.own, size)
        per_rank = shape.heads // size
        heads = slice(rank * per_rank, (rank + 1) * per_rank)
        self.expected = [torch.cat([of[i][:, heads] for of in whole]) for i in range(3)]
        self.send = torch.empty(
            (size, shape.tokens, 3 * per_rank, shape.head_dim),
            dtype=shape.dtype,
            device=groups.device,
        )

    def candidates(self) -> list[Candidate]:
        """All ways whose groups exist, torch's first."""
        ways: dict[str, Callable[[], Sequence[torch.Tensor]]] = {
            "permute + 3 all-to-alls": self._three,
            "permute, concatenate + 1": self._concatenated,
            "one copy per input + 1": self._one_copy_each,
            "ours packed, NCCL": self._ours(self.groups.nccl, self.own),
            "ours in place, NCCL": self._ours(self.groups.nccl, self.packed),
        }
        if self.groups.lent is not None:
            ways["ours symmetric"] = self._ours(self.groups.lent, self.own)
            ways["ours symmetric, shards"] = self._ours(self.groups.lent, self.packed)
        if self.groups.owned is not None:
            ways["ours symmetric, owned"] = self._ours(self.groups.owned, self.own)
        fast = load_fast_ulysses(self.groups) if self.groups.device.type == "cuda" else None
        if fast is not None:
            ways |= _fast_ulysses(fast, [tensor[None] for tensor in self.own], mode=0)
        return [Candidate(name, run, self._check, self.stale(run)) for name, run in ways.items()]

    def _check(self, results: Sequence[torch.Tensor]) -> None:
        for result, want in zip(results, self.expected, strict=True):
            expect_bits(want)(result)

    def stale(self, run: Callable[[], Any]) -> Callable[[], None]:
        """Run with other inputs first, so that a buffer left from before is no right answer."""

        def prepare() -> None:
            _negate([*self.own, *self.packed])
            run()
            _negate([*self.own, *self.packed])

        return prepare

    def _ours(
        self, group: dist.ProcessGroup, tensors: Sequence[torch.Tensor]
    ) -> Callable[[], Sequence[torch.Tensor]]:
        workspace = Workspace()
        return lambda: scatter_heads_gather_seqlen(tensors, self.splits, group, workspace=workspace)

    def _shards(self) -> list[torch.Tensor]:
        return [tensor.unflatten(1, (self.groups.size, -1)).transpose(0, 1) for tensor in self.own]

    def _three(self) -> list[torch.Tensor]:
        results = []
        for shards in self._shards():
            send = shards.contiguous()
            received = torch.empty_like(send)
            dist.all_to_all_single(received, send, group=self.groups.nccl)
            results.append(received.flatten(0, 1))
        return results

    def _concatenated(self) -> Sequence[torch.Tensor]:
        return self._exchange(torch.cat([s.contiguous() for s in self._shards()], dim=2))

    def _one_copy_each(self) -> Sequence[torch.Tensor]:
        for target, source in zip(self.send.chunk(3, dim=2), self._shards(), strict=True):
            target.copy_(source)
        return self._exchange(self.send)

    def _exchange(self, send: torch.Tensor) -> Sequence[torch.Tensor]:
        received = torch.empty_like(send)
        dist.all_to_all_single(received, send, group=self.groups.nccl)
        return received.flatten(0, 1).chunk(3, dim=1)


class OutputExchange:
    """The attention output of every rank, and the ways to trade heads for tokens."""

    inputs = 1

    def __init__(self, shape: Shape, groups: Groups) -> None:
        self.shape, self.groups = shape, groups
        size = groups.size
        self.splits = [shape.tokens] * size
        local = (size * shape.tokens, shape.heads // size, shape.head_dim)
        whole = [_values(local, shape, groups.device, 900 + r) for r in range(size)]
        self.own = whole[groups.rank]
        mine = slice(groups.rank * shape.tokens, (groups.rank + 1) * shape.tokens)
        self.expected = torch.cat([tensor[mine] for tensor in whole], dim=1)

    def candidates(self) -> list[Candidate]:
        """All ways whose groups exist, torch's first."""
        nccl, lent, owned = self.groups.nccl, self.groups.lent, self.groups.owned
        ways: dict[str, Callable[[], torch.Tensor]] = {
            "all-to-all + permute": self._plain,
            "ours flat, NCCL": self._ours(scatter_seqlen_gather_heads, nccl),
            "ours as a view, NCCL": self._ours(scatter_seqlen_gather_head_shards, nccl),
        }
        if lent is not None:
            ways["ours flat, symmetric"] = self._ours(scatter_seqlen_gather_heads, lent)
            ways["ours symmetric"] = self._ours(scatter_seqlen_gather_head_shards, lent)
        if owned is not None:
            ways["ours symmetric, owned"] = self._ours(scatter_seqlen_gather_head_shards, owned)
        fast = load_fast_ulysses(self.groups) if self.groups.device.type == "cuda" else None
        if fast is not None:
            for name, run in _fast_ulysses(fast, [self.own[None]], mode=1).items():
                ways[name] = lambda run=run: run()[0]
        return [Candidate(name, run, self._check, self._stale(run)) for name, run in ways.items()]

    def _check(self, result: torch.Tensor) -> None:
        expect_bits(self.expected)(result.flatten(1, 2) if result.dim() == 4 else result)

    def _stale(self, run: Callable[[], Any]) -> Callable[[], None]:
        def prepare() -> None:
            _negate([self.own])
            run()
            _negate([self.own])

        return prepare

    def _ours(
        self, exchange: Callable[..., torch.Tensor], group: dist.ProcessGroup
    ) -> Callable[[], torch.Tensor]:
        workspace = Workspace()
        return lambda: exchange(self.own, self.splits, group, workspace=workspace)

    def _plain(self) -> torch.Tensor:
        received = torch.empty_like(self.own)
        dist.all_to_all_single(received, self.own, group=self.groups.nccl)
        by_rank = received.unflatten(0, (self.groups.size, -1))
        return by_rank.transpose(0, 1).flatten(1, 2)


class Exchanged(Protocol):
    """What the floor has to know of a case."""

    inputs: int
    shape: Shape
    groups: Groups


def floor_of(exchange: Exchanged) -> Candidate:
    """Flat copies of the remote share into the peers' memory, and nothing else: no signal, no own
    share. On a CPU one copy of as many bytes.
    """
    groups, shape = exchange.groups, exchange.shape
    nbytes = shape.remote_bytes(exchange.inputs, groups.size) // (groups.size - 1)
    source = torch.full((nbytes,), groups.rank + 1, dtype=torch.uint8, device=groups.device)
    if groups.device.type != "cuda":
        target = torch.empty((groups.size - 1, nbytes), dtype=torch.uint8)
        return Candidate(FLOOR, lambda: target.copy_(source))
    from torch.distributed import _symmetric_memory as symmetric

    memory = symmetric.empty(groups.size * nbytes, device=groups.device, dtype=torch.uint8)
    handle = symmetric.rendezvous(memory, groups.nccl.group_name)
    peers = [(groups.rank + step) % groups.size for step in range(1, groups.size)]
    targets = [
        handle.get_buffer(peer, (groups.size, nbytes), torch.uint8)[groups.rank] for peer in peers
    ]
    streams = [torch.cuda.Stream() for _ in peers[1:]]

    def run() -> torch.Tensor:
        current = torch.cuda.current_stream()
        for stream, target in zip(streams, targets[1:], strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
        targets[0].copy_(source, non_blocking=True)
        for stream in streams:
            current.wait_stream(stream)
        return memory

    def check(received: torch.Tensor) -> None:
        dist.barrier()
        torch.cuda.synchronize()
        for peer in peers:
            rows = received.view(groups.size, nbytes)[peer]
            assert bool((rows == peer + 1).all()), f"the share of rank {peer} is not there"

    return Candidate(FLOOR, run, check)


def _fast_ulysses(
    group: Any, tensors: Sequence[torch.Tensor], mode: int
) -> dict[str, Callable[[], list[torch.Tensor]]]:
    """Its exchange takes one tensor (1, tokens, heads, head_dim) at a time."""
    outs = [group.empty_output(tensor, mode=mode) for tensor in tensors]
    pairs = list(zip(tensors, outs, strict=True))
    return {
        "fast-ulysses": lambda: [group.all_to_all_4d(t, mode=mode)[0] for t in tensors],
        "fast-ulysses, out=": lambda: [
            group.all_to_all_4d(t, mode=mode, out=out)[0] for t, out in pairs
        ],
    }


def _values(shape: tuple[int, ...], of: Shape, device: torch.device, seed: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device).to(of.dtype)


def _negate(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.neg_()
