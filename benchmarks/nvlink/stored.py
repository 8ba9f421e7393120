"""What stands for the kernel that makes q, k and v: a copy to where an opened exchange wants them.

T = tokens of a rank, W = ranks, H = heads of a rank, D = head_dim
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ulysses_comm import HeadScatterTarget, open_head_scatter

_ROWS = 4  # tokens of a program


def open_started(
    shards: Sequence[torch.Tensor], splits: Sequence[int], group: dist.ProcessGroup
) -> HeadScatterTarget:
    """Open the exchange of q, k and v, each (T, W, H, D), that `start()` is to start."""
    first = shards[0]
    counts = [tensor.shape[1] * tensor.shape[2] for tensor in shards]
    return open_head_scatter(
        counts, first.shape[-1], first.dtype, splits, group, device=first.device, started=True
    )


def store_rows(shards: Sequence[torch.Tensor], addresses: torch.Tensor) -> None:
    """Store q, k and v, each (T, W, H, D) of the same strides, to W addresses."""
    if shards[0].device.type == "cuda":
        store_by_kernel(shards, addresses)
        return
    for rank, address in enumerate(addresses.tolist()):
        rows = torch.cat([tensor[:, rank] for tensor in shards], dim=1).contiguous()
        ctypes.memmove(address, rows.data_ptr(), rows.nbytes)


def store_by_kernel(shards: Sequence[torch.Tensor], addresses: torch.Tensor) -> None:
    """As `store_rows`, by a Triton kernel in one launch."""
    import triton

    from benchmarks.nvlink.store_kernel import store_rows_kernel

    tokens, world_size, heads, dim = shards[0].shape
    assert len(shards) == 3
    for tensor in shards:
        assert tensor.stride() == shards[0].stride()
        assert tensor.stride()[2:] == (dim, 1)
    part, head_bytes = heads * dim, dim * shards[0].element_size()
    store_rows_kernel[(triton.cdiv(tokens, _ROWS), world_size)](
        *shards,
        addresses,
        tokens,
        shards[0].stride(0),
        shards[0].stride(1),
        PART=part,
        ROWS=_ROWS,
        PIECE=triton.next_power_of_2(part),
        # The largest power of two that divides 16 and a head's bytes.
        ALIGN=(head_bytes | 16) & -(head_bytes | 16),
        num_warps=8,
    )
