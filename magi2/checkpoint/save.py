"""From a state dict to shards on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from magi2.checkpoint.index import INDEX_NAME
from magi2.checkpoint.shard_file import write_shard
from magi2.config import Magi2Config

CONFIG_NAME = "config.json"


def save_checkpoint(
    state_dict: Mapping[str, torch.Tensor],
    config: Magi2Config,
    folder: str | Path,
    max_shard_bytes: int = 4 << 30,
) -> None:
    """Write a checkpoint in the released layout, beside a `config.json`.

    Args:
        state_dict: A whole model's, in released names and in the dtypes to store.
        config: The model's.
        folder: Made if absent; must not hold a checkpoint yet.
        max_shard_bytes: A shard is closed before it grows past this; a larger tensor gets its own.

    Raises:
        ValueError: If the folder holds a checkpoint, or max_shard_bytes is not positive.
    """
    folder = Path(folder)
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes={max_shard_bytes}: expected a positive number.")
    if (folder / INDEX_NAME).exists():
        raise ValueError(f"{folder} already holds a checkpoint: choose another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    shards = _divide(state_dict, max_shard_bytes)
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_shard(folder / file_name, [(name, state_dict[name]) for name in names])
        weight_map.update(dict.fromkeys(names, file_name))
    total_size = sum(_num_bytes(tensor) for tensor in state_dict.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(folder / CONFIG_NAME, config.to_dict())
    # Last: a folder with an index is a whole checkpoint.
    _write_json(folder / INDEX_NAME, index)


def _divide(state_dict: Mapping[str, torch.Tensor], max_shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in state_dict.items():
        size = _num_bytes(tensor)
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _write_json(path: Path, document: object) -> None:
    temporary = path.with_name(path.name + ".partial")
    temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)
