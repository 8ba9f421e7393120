"""diffusers: the exchange of its unified attention, and the one for any token counts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from benchmarks.peers.way import OUTPUT, QKV, Missing, Peer, Way, version_of

_MODULE = "diffusers.models.attention_dispatch"


def load() -> Peer:
    """Return the exchange for equal token counts.

    Raises:
        Missing: If diffusers is not installed or does not import.
    """
    version, dispatch = _import()

    def scatter_heads(
        tensors: Sequence[torch.Tensor], _: Sequence[int], group: dist.ProcessGroup
    ) -> list[torch.Tensor]:
        return [dispatch.SeqAllToAllDim.apply(group, tensor, 2, 1) for tensor in tensors]

    def scatter_seqlen(
        tensors: Sequence[torch.Tensor], _: Sequence[int], group: dist.ProcessGroup
    ) -> list[torch.Tensor]:
        return [dispatch.SeqAllToAllDim.apply(group, tensor, 1, 2) for tensor in tensors]

    return Peer(
        "diffusers",
        "diffusers",
        version,
        f"{_MODULE}.SeqAllToAllDim, as its unified attention calls it",
        (
            Way("diffusers", QKV, scatter_heads, "bshd"),
            Way("diffusers", OUTPUT, scatter_seqlen, "bshd"),
        ),
    )


def load_anything() -> Peer:
    """Return the exchange for any token counts, which asks all ranks for theirs in every call.

    Raises:
        Missing: If diffusers is not installed or does not import.
    """
    version, dispatch = _import()
    name = "diffusers any"
    lacks = "diffusers' TemplatedUlyssesAnythingAttention raises NotImplementedError in backward"

    def scatter_heads(
        tensors: Sequence[torch.Tensor], _: Sequence[int], group: dist.ProcessGroup
    ) -> list[torch.Tensor]:
        # All three are started before the first is waited for, as the attention does.
        waits = [dispatch.all_to_all_single_any_qkv_async(tensor, group) for tensor in tensors]
        return [wait() for wait in waits]

    def scatter_seqlen(
        tensors: Sequence[torch.Tensor], split_sizes: Sequence[int], group: dist.ProcessGroup
    ) -> list[torch.Tensor]:
        (tensor,) = tensors
        wait = dispatch.all_to_all_single_any_o_async(
            tensor,
            group,
            NUM_QO_HEAD=tensor.shape[2] * group.size(),
            Q_S_LOCAL=split_sizes[group.rank()],
        )
        return [wait()]

    return Peer(
        name,
        "diffusers",
        version,
        f"{_MODULE}.all_to_all_single_any_qkv_async and all_to_all_single_any_o_async",
        (
            Way(name, QKV, scatter_heads, "bshd", lacks_backward=lacks),
            Way(name, OUTPUT, scatter_seqlen, "bshd", lacks_backward=lacks),
        ),
    )


def _import() -> tuple[str, object]:
    version = version_of("diffusers")
    try:
        from diffusers.models import attention_dispatch
    except Exception as error:
        raise Missing(f"diffusers {version} does not import: {error}") from error
    return version, attention_dispatch
