"""DeepSpeed: the exchange of its DistributedAttention, over plain torch collectives."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist

from benchmarks.peers.way import OUTPUT, QKV, Missing, Peer, Way, version_of


def load() -> Peer:
    """Return the peer.

    Raises:
        Missing: If DeepSpeed is not installed or does not import.
    """
    version = version_of("deepspeed")
    # Without it DeepSpeed looks for GPUs of seven makers and warns that it found none.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        from deepspeed.sequence import layer
    except Exception as error:
        raise Missing(f"deepspeed {version} does not import: {error}") from error
    # deepspeed.comm compiles a C++ extension before its first collective and adds a timer to each;
    # the layer itself only asks for all_to_all_single and get_world_size.
    layer.dist = dist

    def scatter_heads(
        tensors: Sequence[torch.Tensor], _: Sequence[int], group: dist.ProcessGroup
    ) -> list[torch.Tensor]:
        return [layer._SeqAllToAll.apply(group, tensor, 2, 1, 0) for tensor in tensors]

    def scatter_seqlen(
        tensors: Sequence[torch.Tensor], _: Sequence[int], group: dist.ProcessGroup
    ) -> list[torch.Tensor]:
        return [layer._SeqAllToAll.apply(group, tensor, 1, 2, 0) for tensor in tensors]

    return Peer(
        "deepspeed",
        "deepspeed",
        version,
        "deepspeed.sequence.layer._SeqAllToAll, batch first, as DistributedAttention calls it, "
        "with torch.distributed in the place of deepspeed.comm",
        (
            Way("deepspeed", QKV, scatter_heads, "bshd"),
            Way("deepspeed", OUTPUT, scatter_seqlen, "bshd"),
        ),
    )
