"""The index of a sharded checkpoint: which file holds which tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from magi2.checkpoint.shard_file import ShardFile
from magi2.checks import is_finite_number, parse_json

INDEX_NAME = "model.safetensors.index.json"
_MAX_NAMES = 20


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """An opened checkpoint folder.

    Args:
        folder: Where it lies.
        files: The shards, by file name.
        file_of: The shard of each tensor, by tensor name.
    """

    folder: Path
    files: Mapping[str, ShardFile]
    file_of: Mapping[str, ShardFile]


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Read the index and the header of every shard; no tensor is read.

    Raises:
        ValueError: If the index is missing or malformed, a shard is missing, truncated or
            malformed, or index and shards disagree. All such faults are listed together.
    """
    folder = Path(folder)
    weight_map, total_size = _read_index(folder / INDEX_NAME)
    faults: list[str] = []
    files: dict[str, ShardFile] = {}
    for file_name in sorted(set(weight_map.values())):
        try:
            files[file_name] = ShardFile(folder / file_name)
        except ValueError as error:
            faults.append(str(error))
    lost = [n for n, file in weight_map.items() if file in files and n not in files[file].tensors]
    unlisted = [
        f"{name} ({file})"
        for file, shard in files.items()
        for name in shard.tensors
        if weight_map.get(name) != file
    ]
    faults += list_names("in the index, but not in the shard it names", lost)
    faults += list_names("in a shard, but not so in the index", unlisted)
    # Other safetensors files beside the shards, such as text features, are no part of them.
    faults += list_names(
        "shards in the folder that the index does not name",
        sorted({path.name for path in folder.glob("model*.safetensors")} - {*weight_map.values()}),
    )
    stored = sum(s.num_bytes for shard in files.values() for s in shard.tensors.values())
    if not faults and total_size is not None and total_size != stored:
        faults.append(f"the index states {total_size} bytes, the shards hold {stored}")
    raise_faults(folder, faults)
    return Checkpoint(
        folder=folder,
        files=files,
        file_of={name: files[file_name] for name, file_name in weight_map.items()},
    )


def list_names(what: str, names: list[str]) -> list[str]:
    """One fault that names tensors, or none; a long list is cut and counted."""
    if not names:
        return []
    shown = ", ".join(sorted(names)[:_MAX_NAMES])
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return [f"{what}: {shown}{more}"]


def raise_faults(folder: Path, faults: list[str]) -> None:
    """Refuse a checkpoint for all faults at once, if there are any.

    Raises:
        ValueError: If there are faults.
    """
    if faults:
        raise ValueError(f"checkpoint {folder} is refused:\n  " + "\n  ".join(faults))


def _read_index(path: Path) -> tuple[dict[str, str], int | None]:
    try:
        document = parse_json(path.read_bytes())
        weight_map = dict(document["weight_map"].items())
        total_size = document.get("metadata", {}).get("total_size")
        if total_size is not None and not is_finite_number(total_size):
            raise ValueError(f"total_size is {total_size}")
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read: {error.strerror}. Expected the index of a sharded checkpoint."
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no checkpoint index: {error!r}.") from error
    # A name with a folder in it could point anywhere on this machine.
    wrong = [
        f"{name} in {file!r}"
        for name, file in weight_map.items()
        if not isinstance(file, str) or Path(file).name != file
    ]
    if wrong:
        raise ValueError(
            f"{path} names files outside its folder: {', '.join(wrong[:_MAX_NAMES])}. Expected the "
            "name of a file beside the index."
        )
    return weight_map, None if total_size is None else int(total_size)
