"""From weights to shards on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from magi2.checkpoint.index import INDEX_NAME
from magi2.checkpoint.shard_file import check_storable, write_shard
from magi2.checkpoint.slices import full_shape, is_sharded
from magi2.config import Magi2Config
from magi2.transformer import Magi2Transformer
from ulysses_comm.group import resolve_group

CONFIG_NAME = "config.json"
DEFAULT_SHARD_BYTES = 4 << 30
_PARTIAL = ".partial"


def save_checkpoint(
    state_dict: Mapping[str, torch.Tensor],
    config: Magi2Config,
    folder: str | Path,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Write a checkpoint in the released layout, beside a `config.json`.

    Args:
        state_dict: A whole model's, in released names and in the dtypes to store.
        config: The model's.
        folder: Made if absent; must not hold a checkpoint yet.
        max_shard_bytes: A shard is closed before it grows past this; a larger tensor gets its own.

    Raises:
        ValueError: If the folder holds shards or an index or is a file, max_shard_bytes is not
            positive, or a tensor has no data or a type that the format does not know.
        OSError: If the folder cannot be written.
    """
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in state_dict.items()}
    folder = _check_target(folder, max_shard_bytes)
    check_storable(state_dict)
    _write(folder, config, sizes, max_shard_bytes, state_dict.__getitem__)


def save_model(
    model: Magi2Transformer, folder: str | Path, max_shard_bytes: int = DEFAULT_SHARD_BYTES
) -> None:
    """Write a model's checkpoint from all its ranks together.

    Every rank calls this. Ranks that share the experts of the first sequence rank send it their
    rows, one tensor at a time; it writes. The others return at once: let a barrier follow.

    Args:
        model: On every rank of its topology, or on a lone rank.
        folder: As in `save_checkpoint`; every rank must see the same one.
        max_shard_bytes: As in `save_checkpoint`. One such shard is held in memory at a time.

    Raises:
        ValueError: As `save_checkpoint`, on every rank that takes part, before anything is sent.
        OSError: On the rank that writes, if it cannot; the others have then sent their rows and
            returned, and the folder holds no index.
    """
    topology, moe = model.topology, model.config.moe
    if topology.cfg_rank or 0 not in topology.expert_ranks:
        return
    state, sizes = model.state_dict(), {}
    if topology.sequence_rank and not any(map(is_sharded, state)):
        return
    folder = _check_target(folder, max_shard_bytes)
    check_storable(state)
    for name, tensor in state.items():
        shape = full_shape(name, tuple(tensor.shape), moe.num_heads, moe.num_experts)
        sizes[name] = torch.Size(shape).numel() * tensor.element_size()
    if topology.expert_size == 1:
        _write(folder, model.config, sizes, max_shard_bytes, state.__getitem__)
    elif topology.sequence_rank == 0:
        _write(
            folder, model.config, sizes, max_shard_bytes, lambda name: _collect(model, name, state)
        )
    else:
        for names in _divide(sizes, max_shard_bytes):
            for name in names:
                _collect(model, name, state)


def _collect(model: Magi2Transformer, name: str, state: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A whole tensor on sequence rank 0; the other expert ranks send their rows of it."""
    local = state[name].detach().contiguous()
    if not is_sharded(name):
        return local
    topology, moe = model.topology, model.config.moe
    group = resolve_group(topology.expert_group)
    writer = topology.expert_ranks.index(0)
    runs = [topology.local_heads(moe.num_heads, rank) for rank in range(topology.expert_size)]
    rows = [len(run) * moe.num_experts for run in runs]
    receives = rows if topology.expert_rank == writer else [0] * len(rows)
    sends = [0] * len(rows)
    sends[writer] = local.shape[0]
    whole = local.new_empty((sum(receives), *local.shape[1:]))
    dist.all_to_all_single(whole, local, receives, sends, group=group)
    return whole


def _check_target(folder: str | Path, max_shard_bytes: int) -> Path:
    folder = Path(folder)
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes={max_shard_bytes}: expected a positive number.")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: expected a folder, or a name for a new one.")
    if (folder / INDEX_NAME).exists() or any(folder.glob("*.safetensors")):
        raise ValueError(
            f"{folder} already holds a checkpoint, or shards of one: choose another folder."
        )
    return folder


def _write(
    folder: Path,
    config: Magi2Config,
    sizes: Mapping[str, int],
    max_shard_bytes: int,
    fetch: Callable[[str], torch.Tensor],
) -> None:
    """Fetch tensors by name, in the order of sizes, and write them shard by shard.

    Fetching may need other ranks: after an error of the disk it goes on to the end, so that they
    are not left waiting, and then raises.
    """
    shards, fault = _divide(sizes, max_shard_bytes), None
    weight_map = {}
    for number, names in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        weight_map.update(dict.fromkeys(names, file_name))
        tensors = [(name, fetch(name)) for name in names]
        try:
            if fault is None:
                folder.mkdir(parents=True, exist_ok=True)
                write_shard(folder / (file_name + _PARTIAL), tensors)
        except OSError as error:
            fault = error
    if fault is not None:
        raise fault
    # Named when all are whole: ranks that look for a checkpoint here see none before.
    for file_name in sorted(set(weight_map.values())):
        os.replace(folder / (file_name + _PARTIAL), folder / file_name)
    index = {
        "metadata": {"total_size": sum(sizes.values())},
        "weight_map": dict(sorted(weight_map.items())),
    }
    _write_json(folder / CONFIG_NAME, config.to_dict())
    # Last: a folder with an index is a whole checkpoint.
    _write_json(folder / INDEX_NAME, index)


def _divide(sizes: Mapping[str, int], max_shard_bytes: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _write_json(path: Path, document: object) -> None:
    temporary = path.with_name(path.name + _PARTIAL)
    temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)
