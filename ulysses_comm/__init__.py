"""Ulysses sequence parallelism: exchanges, head shards and ranks inside one process."""

from ulysses_comm.agreement import RankDisagreementError
from ulysses_comm.exchange import (
    scatter_heads_gather_seqlen,
    scatter_seqlen_gather_head_shards,
    scatter_seqlen_gather_heads,
)
from ulysses_comm.group import LONE_RANK, Group
from ulysses_comm.head_shards import (
    as_send_buffer,
    empty_head_shards,
    flatten_head_shards,
    pack_head_shards,
    pin_head_layout,
)
from ulysses_comm.layout import balanced_split_sizes

__all__ = [
    "LONE_RANK",
    "Group",
    "RankDisagreementError",
    "as_send_buffer",
    "balanced_split_sizes",
    "empty_head_shards",
    "flatten_head_shards",
    "pack_head_shards",
    "pin_head_layout",
    "scatter_heads_gather_seqlen",
    "scatter_seqlen_gather_head_shards",
    "scatter_seqlen_gather_heads",
]
