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

from magi2.checks import parse_json, whole_numbers

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


def check_storable(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors that the format has no type for, or whose data is nowhere.

    Raises:
        ValueError: As said, with their names.
    """
    wrong = [
        f"{name} ({tensor.dtype} on {tensor.device})"
        for name, tensor in tensors.items()
        if tensor.dtype not in _DTYPE_NAMES or tensor.is_meta
    ]
    if wrong:
        raise ValueError(
            f"tensors that cannot be stored: {', '.join(wrong[:20])}, {len(wrong)} in all. "
            f"Expected data of one of {', '.join(str(dtype) for dtype in _DTYPE_NAMES)}."
        )


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
    start, tensors, spans = _LENGTH_BYTES + length, {}, []
    try:
        for name, entry in parse_json(text).items():
            if name != "__metadata__":
                begin, end = whole_numbers("data_offsets", entry["data_offsets"])
                tensors[name] = _stored(name, entry, start + begin)
                spans.append((begin, end))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} has no safetensors header: {error!r}.") from error
    _check_offsets(path, tensors, spans, start, file_bytes)
    return tensors, file_bytes


def _stored(name: str, entry: Mapping[str, Any], offset: int) -> StoredTensor:
    shape, dtype = whole_numbers("shape", entry["shape"]), entry["dtype"]
    if any(size < 0 for size in shape):
        raise ValueError(f"{name} has shape {list(shape)}")
    if dtype not in _DTYPES:
        raise ValueError(f"{name} has dtype {dtype}, expected one of {', '.join(_DTYPES)}")
    return StoredTensor(dtype=_DTYPES[dtype], shape=shape, offset=offset)


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
