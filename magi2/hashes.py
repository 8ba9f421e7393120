"""Hashes by which two runs are compared: of bytes alone, and of tensors with type and shape."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

_CHUNK_BYTES = 1 << 26


def raw_sha256(tensor: torch.Tensor) -> str:
    """SHA-256 of the elements' bytes in row-major order, as lower-case hex digits.

    The same as `hashlib.sha256(array.tobytes())` of the array in numpy. Neither type nor shape
    counts, nor the file format that the tensor is stored in.
    """
    digest = hashlib.sha256()
    _update(digest, tensor)
    return digest.hexdigest()


def tensor_sha256(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's dtype, shape and bytes: different for tensors that differ in any."""
    digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
    _update(digest, tensor)
    return digest.hexdigest()


def tensors_sha256(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of named tensors, whatever their order."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(f"{name!r} {tensor_sha256(tensors[name])}\n".encode())
    return digest.hexdigest()


def _update(digest: hashlib._Hash, tensor: torch.Tensor) -> None:
    # flatten() before view: a tensor of no dimensions has no last one to reinterpret.
    flat = tensor.detach().contiguous().flatten().view(torch.uint8)
    for chunk in flat.split(_CHUNK_BYTES):
        digest.update(chunk.cpu().numpy().data)
