"""One safetensors file: a JSON header, then the tensors' bytes.

Read here, not through the safetensors package, because a rank wants rows of a tensor from the
mapped file, and an error wants to say what is wrong with the file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LENGTH_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Where a tensor lies in a file.

    Args:
        dtype: Of its elements.
        shape: Its shape.
        offset: First byte, from the start of the file.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


class ShardFile:
    """A safetensors file mapped into memory: bytes are read when they are touched.

    Args:
        path: The file.

    Raises:
        ValueError: If the file is missing, truncated, or its header does not describe it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.tensors, self.num_bytes = _read_header(path)
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}.") from error
        self._bytes: torch.Tensor | None = None

    def read(self, name: str, rows: range | None = None) -> torch.Tensor:
        """A tensor, or consecutive rows of it, as a view of the mapped file.

        Args:
            name: Of the tensor.
            rows: Of dimension 0; None for all.

        Returns:
            A view of the mapping; writing to it does not change the file. A copy only where the
            file places the tensor at an address that its dtype cannot have.
        """
        stored = self.tensors[name]
        shape, start, num_bytes = stored.shape, stored.offset, stored.num_bytes
        if rows is not None:
            row_bytes = math.prod(shape[1:]) * stored.dtype.itemsize
            shape, start, num_bytes = (
                (len(rows), *shape[1:]),
                start + rows.start * row_bytes,
                len(rows) * row_bytes,
            )
        data = self._map()[start : start + num_bytes]
        if start % stored.dtype.itemsize:
            data = data.clone()
        return data.view(stored.dtype).view(shape)

    def _map(self) -> torch.Tensor:
        if self._bytes is None:
            # Private mapping: pages come from the file on first touch, and nothing goes back.
            self._bytes = torch.from_file(
                str(self.path), shared=False, size=self.num_bytes, dtype=torch.uint8
            )
        return self._bytes


def write_shard(path: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write one safetensors file from tensors on any device."""
    # Wide elements first, and a header padded to 8 bytes: every tensor is aligned.
    ordered = sorted(tensors, key=lambda item: -item[1].element_size())
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in ordered:
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(_LENGTH_BYTES, "little"))
        file.write(text)
        for _, tensor in ordered:
            flat = tensor.detach().cpu().contiguous().flatten()
            file.write(flat.view(torch.uint8).numpy().data)


def _read_header(path: Path) -> tuple[dict[str, StoredTensor], int]:
    """Parse and check a header; returns the tensors and the size of the file."""
    file_bytes = os.path.getsize(path)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if file_bytes < _LENGTH_BYTES or length > file_bytes - _LENGTH_BYTES:
            raise ValueError(
                f"{path} is truncated: {file_bytes} bytes do not hold a header of {length} bytes. "
                "Fetch the file again."
            )
        text = file.read(length)
    try:
        header = json.loads(text)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        start = _LENGTH_BYTES + length
        tensors = {name: _stored(entry, start) for name, entry in entries.items()}
        ends = [(entry["data_offsets"][0], entry["data_offsets"][1]) for entry in entries.values()]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{path} has no safetensors header: {error!r}.") from error
    _check_offsets(path, tensors, ends, start, file_bytes)
    return tensors, file_bytes


def _stored(entry: Mapping[str, Any], data_start: int) -> StoredTensor:
    return StoredTensor(
        dtype=_DTYPES[entry["dtype"]],
        shape=tuple(int(size) for size in entry["shape"]),
        offset=data_start + int(entry["data_offsets"][0]),
    )


def _check_offsets(
    path: Path,
    tensors: Mapping[str, StoredTensor],
    spans: Iterable[tuple[int, int]],
    data_start: int,
    file_bytes: int,
) -> None:
    expected = 0
    for (name, stored), (begin, end) in sorted(
        zip(tensors.items(), spans, strict=True), key=lambda item: item[1]
    ):
        if begin != expected or end - begin != stored.num_bytes:
            raise ValueError(
                f"{path}: {name} is said to lie at bytes {begin} to {end}; expected "
                f"{stored.num_bytes} bytes from {expected} on. The header is damaged."
            )
        expected = end
    if data_start + expected != file_bytes:
        kind = "truncated" if data_start + expected > file_bytes else "too long"
        raise ValueError(
            f"{path} is {kind}: {file_bytes} bytes, expected {data_start + expected} from its "
            "header. Fetch the file again."
        )
