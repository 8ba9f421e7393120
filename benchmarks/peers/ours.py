"""The exchanges of `ulysses_comm`, with a workspace and without."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from benchmarks.peers.way import OUTPUT, QKV, Way
from ulysses_comm import (
    Workspace,
    scatter_heads_gather_seqlen,
    scatter_seqlen_gather_head_shards,
    scatter_seqlen_gather_heads,
)

KEPT = "ours, kept"
KEPT_FLAT = "ours, kept, flat"
IN_PLACE = "ours, kept, in place"
DEFAULT = "ours, no workspace"
DEFAULT_FLAT = "ours, no workspace, flat"


def ways() -> list[Way]:
    """Every form of ours; "flat" is the output exchange that copies its result once."""
    workspace = Workspace()

    def scatter_heads(kept: Workspace | None) -> object:
        def call(
            tensors: Sequence[torch.Tensor], split_sizes: Sequence[int], group: dist.ProcessGroup
        ) -> list[torch.Tensor]:
            return scatter_heads_gather_seqlen(tensors, split_sizes, group, workspace=kept)

        return call

    def scatter_seqlen(kept: Workspace | None, exchange: object) -> object:
        def call(
            tensors: Sequence[torch.Tensor], split_sizes: Sequence[int], group: dist.ProcessGroup
        ) -> list[torch.Tensor]:
            return [exchange(tensors[0], split_sizes, group, workspace=kept)]

        return call

    shards, flat = scatter_seqlen_gather_head_shards, scatter_seqlen_gather_heads
    return [
        Way(KEPT, QKV, scatter_heads(workspace)),
        Way(IN_PLACE, QKV, scatter_heads(workspace), "shards"),
        Way(DEFAULT, QKV, scatter_heads(None)),
        Way(KEPT, OUTPUT, scatter_seqlen(workspace, shards)),
        Way(KEPT_FLAT, OUTPUT, scatter_seqlen(workspace, flat)),
        Way(DEFAULT, OUTPUT, scatter_seqlen(None, shards)),
        Way(DEFAULT_FLAT, OUTPUT, scatter_seqlen(None, flat)),
    ]
