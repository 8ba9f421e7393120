"""Buffers of asynchronous calls: unreadable until `wait()`, and watched for changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ulysses_comm.simulator.traffic import digest_of


@dataclass(slots=True)
class WatchedBuffer:
    """A buffer that must not change between an asynchronous call and its `wait()`.

    In-place operations of torch raise a tensor's version. Writes that go around it, through `.data`
    or from a foreign kernel, are only seen where `digest` is kept.
    """

    role: str
    tensor: torch.Tensor
    version: int | None
    digest: str | None

    @classmethod
    def of(cls, role: str, tensor: torch.Tensor, *, digest: bool = False) -> WatchedBuffer:
        """Remember the present state of a tensor."""
        version = None if tensor.is_inference() else tensor._version
        return cls(
            role, tensor, version, digest_of(tensor) if digest and not tensor.is_meta else None
        )

    def changed(self) -> bool:
        """Tell whether the tensor was written since."""
        if self.version is not None and self.tensor._version != self.version:
            return True
        return self.digest is not None and digest_of(self.tensor) != self.digest


def take_over(
    sends: list[torch.Tensor], receives: Sequence[torch.Tensor], *, digests: bool
) -> list[WatchedBuffer]:
    """Make the receive buffers of an asynchronous call unreadable, and watch all its buffers.

    What is sent from the memory that will receive (an all-reduce in place, say) is copied first:
    `sends` then holds the copies.
    """
    receiving = {tensor.untyped_storage().data_ptr() for tensor in receives}
    watched = []
    for i, send in enumerate(sends):
        if send.untyped_storage().data_ptr() in receiving:
            sends[i] = send.detach().clone()
        else:
            watched.append(WatchedBuffer.of("send buffer", send, digest=digests))
    with torch.inference_mode():
        for receive in receives:
            fill_unreadable(receive.detach())
    watched += [WatchedBuffer.of("receive buffer", receive) for receive in receives]
    return watched


def fill_unreadable(tensor: torch.Tensor) -> None:
    """Fill a tensor with what shows when it is read too early.

    NaN for floating and complex dtypes; all bits set for one-byte integers, which are NaN again
    when the bytes are viewed as a floating dtype; the smallest number for signed, the largest for
    unsigned integers. Booleans have no such value and stay as they are.
    """
    dtype = tensor.dtype
    if tensor.numel() == 0 or dtype == torch.bool:
        return
    if dtype.is_floating_point or dtype.is_complex:
        if dtype.itemsize == 1:
            # fp8: not every dtype has fill_, all of them read 0xFF as NaN or have no NaN at all.
            tensor.view(torch.uint8).fill_(0xFF)
        else:
            tensor.fill_(float("nan"))
    elif dtype.itemsize == 1:
        tensor.fill_(-1 if dtype.is_signed else 0xFF)
    else:
        info = torch.iinfo(dtype)
        tensor.fill_(info.min if dtype.is_signed else info.max)
