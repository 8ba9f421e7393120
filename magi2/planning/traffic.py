"""What the ranks send each other in one call of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from magi2.config import Magi2Config
from magi2.planning.layout import RankLayout
from magi2.timing.exchanges import BRANCHES, DISPATCH, OUTPUT, QKV, RESULT, RETURN
from magi2.topology import heads_per_rank
from ulysses_comm import CostModel

_FLOAT32 = torch.float32.itemsize


@dataclass(frozen=True, kw_only=True)
class ExchangePlan:
    """One kind of exchange.

    Attributes:
        name: As in the timing of a run.
        count: In one call of the model.
        buffer_bytes: The whole send buffer of the busiest rank, what it keeps included; of a
            gather its rows once.
        sent: Bytes from each rank of the group (row) to each (column), in one exchange.
        ranks: Which ranks of the world these are.
    """

    name: str
    count: int
    buffer_bytes: int
    sent: list[list[int]]
    ranks: tuple[int, ...]

    @property
    def sent_bytes(self) -> int:
        """What leaves the busiest rank in one exchange."""
        rows = enumerate(self.sent)
        return max(sum(n for peer, n in enumerate(row) if peer != rank) for rank, row in rows)

    def seconds(self, links: CostModel) -> float:
        """Of all exchanges of this kind, one after another."""
        return self.count * links.all_to_all_seconds(self.sent, self.ranks)


def plan_exchanges(config: Magi2Config, layout: RankLayout) -> list[ExchangePlan]:
    """The exchanges of the busiest sequence group, in the order of their first use."""
    sizes, width = layout.split_sizes, config.dtype.itemsize
    group, run = range(layout.ulysses), range(layout.expert)
    exchanges = []
    if layout.ulysses > 1:
        heads = (config.num_heads + 2 * config.num_kv_heads) // layout.ulysses
        out = config.num_heads // layout.ulysses
        row = config.head_dim * width
        layers = config.num_layers
        exchanges += [
            _to_owners(QKV, layers, sizes, heads * row, group),
            _to_tokens(OUTPUT, layers, sizes, out * row, group),
        ]
    if layout.expert > 1 and config.moe.layers:
        heads = heads_per_rank(config.moe.num_heads, layout.expert)
        row = heads * config.moe_head_dim * width
        layers = len(config.moe.layers)
        exchanges += [
            _to_owners(DISPATCH, layers, sizes[: layout.expert], row, run),
            _to_tokens(RETURN, layers, sizes[: layout.expert], row, run),
        ]
    row = config.output_channels * _FLOAT32
    if layout.ulysses > 1:
        exchanges.append(_to_everyone(RESULT, sizes, row, group))
    if layout.cfg > 1:
        exchanges.append(_to_everyone(BRANCHES, layout.tokens, row, (0, layout.ulysses)))
    return exchanges


def _to_owners(
    name: str, count: int, sizes: Sequence[int], row_bytes: int, ranks: Sequence[int]
) -> ExchangePlan:
    """Every rank sends all its tokens to everyone, a share of the heads to each."""
    sent = [[tokens * row_bytes] * len(sizes) for tokens in sizes]
    return _exchange(name, count, max(sum(row) for row in sent), sent, ranks)


def _to_tokens(
    name: str, count: int, sizes: Sequence[int], row_bytes: int, ranks: Sequence[int]
) -> ExchangePlan:
    """The way back: every rank gets its own tokens from everyone."""
    sent = [[tokens * row_bytes for tokens in sizes] for _ in sizes]
    return _exchange(name, count, max(sum(row) for row in sent), sent, ranks)


def _to_everyone(
    name: str, sizes: Sequence[int], row_bytes: int, ranks: Sequence[int]
) -> ExchangePlan:
    sent = [[tokens * row_bytes] * len(sizes) for tokens in sizes]
    return _exchange(name, 1, max(sizes) * row_bytes, sent, ranks)


def _exchange(
    name: str, count: int, buffer_bytes: int, sent: list[list[int]], ranks: Sequence[int]
) -> ExchangePlan:
    return ExchangePlan(
        name=name, count=count, buffer_bytes=buffer_bytes, sent=sent, ranks=tuple(ranks)
    )
