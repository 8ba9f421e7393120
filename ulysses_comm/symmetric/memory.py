"""Memory that every rank of a group has a piece of, and can address in all of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Block:
    """One symmetric allocation, equally large on every rank.

    Attributes:
        tensor: This rank's piece, (nbytes,) of uint8, alone in its storage.
        peers: All ranks' pieces as this rank sees them, in rank order, (nbytes,) of uint8 each.
        addresses: Where they begin in this rank's address space.
        handle: What keeps the peers' memory mapped.
    """

    tensor: torch.Tensor
    peers: tuple[torch.Tensor, ...]
    addresses: tuple[int, ...]
    handle: object = field(repr=False)


class SymmetricMemory(Protocol):
    """Where blocks come from."""

    def allocate(self, nbytes: int) -> Block:
        """Return a block; every rank has to call this with the same size."""
        ...


class TorchMemory:
    """torch's symmetric memory of a group."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        # The name, not the group: what is kept for a group must not keep it alive.
        self._name, self._device = group.group_name, device
        self._rank, self._size = group.rank(), group.size()

    def allocate(self, nbytes: int) -> Block:
        """Allocate and map the peers' pieces; the first use of a group takes tens of milliseconds.

        Raises:
            RuntimeError: If memory runs out, torch puts the tensor where peers do not look, or it
                knows another group of this name.
        """
        from torch._C._distributed_c10d import _SymmetricMemory
        from torch.distributed import _symmetric_memory as symmetric

        with torch.cuda.device(self._device), torch.inference_mode(False):
            # Not `symmetric.empty`: its memory may come from a pool, at any offset.
            tensor = _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, self._device)
            handle = symmetric.rendezvous(tensor, self._name)
            if handle is None:
                raise RuntimeError(
                    f"torch made no symmetric memory of {nbytes} bytes: rendezvous gave nothing."
                )
            if (handle.rank, handle.world_size) != (self._rank, self._size):
                # It keeps groups by name, and names come again after destroy_process_group.
                raise RuntimeError(
                    f"torch's symmetric memory takes group {self._name!r} for one of "
                    f"{handle.world_size} ranks in which this is rank {handle.rank}: expected "
                    f"{self._size} ranks and rank {self._rank}. A group of that name was destroyed "
                    "before in this process; start new processes, or use the transport "
                    "'collective'."
                )
            peers = tuple(
                handle.get_buffer(peer, (nbytes,), torch.uint8) for peer in range(handle.world_size)
            )
        addresses = tuple(peer.data_ptr() for peer in peers)
        if addresses[self._rank] != tensor.data_ptr():
            raise RuntimeError(
                f"torch's symmetric memory shows this rank's tensor at {addresses[self._rank]:#x}, "
                f"and it lies at {tensor.data_ptr():#x}: expected one address. This torch "
                f"{torch.__version__} is not supported; use the transport 'collective'."
            )
        return Block(tensor, peers, addresses, handle)
