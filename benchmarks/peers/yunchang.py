"""yunchang (long-context-attention): one all-to-all for each of q, k, v and the output."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from benchmarks.peers.way import OUTPUT, QKV, Missing, Peer, Way, version_of


def load() -> Peer:
    """Return the peer.

    Raises:
        Missing: If yunchang is not installed or does not import.
    """
    version = version_of("yunchang")
    try:
        from yunchang.comm.all_to_all import SeqAllToAll4D
    except Exception as error:
        raise Missing(f"yunchang {version} does not import: {error}") from error

    def scatter_heads(
        tensors: Sequence[torch.Tensor], _: Sequence[int], group: dist.ProcessGroup
    ) -> list[torch.Tensor]:
        return [SeqAllToAll4D.apply(group, tensor, 2, 1) for tensor in tensors]

    def scatter_seqlen(
        tensors: Sequence[torch.Tensor], _: Sequence[int], group: dist.ProcessGroup
    ) -> list[torch.Tensor]:
        return [SeqAllToAll4D.apply(group, tensor, 1, 2) for tensor in tensors]

    return Peer(
        "yunchang",
        "yunchang",
        version,
        "yunchang.comm.all_to_all.SeqAllToAll4D, as yunchang.UlyssesAttention calls it",
        (
            Way("yunchang", QKV, scatter_heads, "bshd"),
            Way("yunchang", OUTPUT, scatter_seqlen, "bshd"),
        ),
    )
