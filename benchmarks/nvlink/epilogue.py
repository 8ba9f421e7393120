"""From the projection's output to exchanged heads: norms, rotation and the Q/K/V exchange.

T = tokens of a rank, W = ranks, H = heads of each of q, k and v, D = head_dim
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from benchmarks.harness import Candidate, expect_bits
from benchmarks.nvlink.groups import Groups
from benchmarks.nvlink.ways import Shape
from magi2.ops.attention_heads import (
    HeadTile,
    send_buffer_views,
    store_heads_at_triton,
    store_heads_triton,
)
from ulysses_comm import Workspace, open_head_scatter, scatter_heads_gather_seqlen

EPS = 1e-6
STORE = "store to a send buffer, no exchange"


class EpilogueExchange:
    """What one rank projects, of one weight set, and the ways to store and exchange it."""

    inputs = 3

    def __init__(self, shape: Shape, groups: Groups) -> None:
        self.shape, self.groups = shape, groups
        self.splits = [shape.tokens] * groups.size
        heads, dim, device = shape.heads, shape.head_dim, groups.device
        generator = torch.Generator(device).manual_seed(40 + groups.rank)

        def values(*sizes: int) -> torch.Tensor:
            return torch.randn(sizes, generator=generator, device=device)

        self.qkv = values(shape.tokens, 3 * heads * dim).to(shape.dtype)
        weights = values(1, dim) * 0.2, values(1, dim) * 0.2
        order = torch.arange(shape.tokens, device=device)
        rotary = values(shape.tokens, 6 * (dim // 8))
        sizes = (shape.tokens, 0, 0)
        self.arguments = (self.qkv, *weights, sizes, order, rotary, heads, heads, EPS)
        self.stored = self._store()
        self.expected = [t.clone() for t in self._then_exchange(groups.nccl)()]

    def candidates(self) -> list[Candidate]:
        """All ways whose groups exist."""
        ways = {"ours stored, then NCCL in place": self._then_exchange(self.groups.nccl)}
        if self.groups.lent is not None:
            ways["ours stored, then symmetric push"] = self._then_exchange(self.groups.lent)
            ways["ours symmetric, stored to peers"] = self._to_peers(self.groups.lent, None)
            many = HeadTile(heads=8)
            ways["ours symmetric, 8 heads a program"] = self._to_peers(self.groups.lent, many)
        found = [Candidate(name, run, self.check, self.stale(run)) for name, run in ways.items()]
        alone = Candidate(STORE, self._store, expect_bits(self.stored), self.stale(self._store))
        return [alone, *found]

    def _store(self) -> torch.Tensor:
        return store_heads_triton(*self.arguments, self.groups.size)

    def _then_exchange(self, group: dist.ProcessGroup) -> Callable[[], Sequence[torch.Tensor]]:
        workspace, heads = Workspace(), self.shape.heads

        def run() -> Sequence[torch.Tensor]:
            shards = send_buffer_views(self._store(), heads, heads)
            return scatter_heads_gather_seqlen(shards, self.splits, group, workspace=workspace)

        return run

    def _to_peers(
        self, group: dist.ProcessGroup, tile: HeadTile | None
    ) -> Callable[[], Sequence[torch.Tensor]]:
        shape, device = self.shape, self.groups.device
        counts = [shape.heads] * 3

        def run() -> Sequence[torch.Tensor]:
            target = open_head_scatter(
                counts, shape.head_dim, shape.dtype, self.splits, group, device=device
            )
            store_heads_at_triton(*self.arguments, target.addresses, tile)
            return target.finish()

        return run

    def check(self, results: Sequence[torch.Tensor]) -> None:
        for result, want in zip(results, self.expected, strict=True):
            expect_bits(want)(result)

    def stale(self, run: Callable[[], object]) -> Callable[[], None]:
        """Run with other inputs first, so that a buffer left from before is no right answer."""

        def prepare() -> None:
            self.qkv.neg_()
            run()
            self.qkv.neg_()

        return prepare
