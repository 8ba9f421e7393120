"""An unfinished run on disk: the sampler's state after its last step, and which run it belongs to.

The file is one safetensors file: the tensors of the state, and as metadata the state's own strings
beside a fingerprint, which names everything that has to be equal for the run to go on with the
same bits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from magi2.atomic_file import write_atomically
from magi2.checks import parse_json

STATE_NAME = "state.safetensors"
_FINGERPRINT = "run_fingerprint"
_MAX_SHOWN = 60


@dataclass(frozen=True, kw_only=True)
class StoredState:
    """What a state file holds.

    Args:
        tensors: Of the sampler's state.
        metadata: Its strings.
        fingerprint: Of the run that wrote it.
    """

    tensors: Mapping[str, torch.Tensor]
    metadata: Mapping[str, str]
    fingerprint: Mapping[str, str]


def save_state(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str],
    fingerprint: Mapping[str, str],
) -> None:
    """Write a state so that the file holds this one or the one before, whatever happens.

    Args:
        path: The file.
        tensors: The sampler's, on any device.
        metadata: The sampler's strings.
        fingerprint: Names and values of what the run depends on.

    Raises:
        OSError: If the disk refuses it, such as a full one; the state before is still there.
    """
    from safetensors.torch import save

    assert _FINGERPRINT not in metadata, "the sampler's own strings have other names"
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    strings = {**metadata, _FINGERPRINT: json.dumps(dict(sorted(fingerprint.items())))}
    write_atomically(path, save(stored, metadata=strings))


def load_state(path: Path) -> StoredState:
    """Read a state file, to the CPU.

    Raises:
        ValueError: If it is no state file or cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        fingerprint = parse_json(metadata.pop(_FINGERPRINT))
        values = {str(name): str(value) for name, value in fingerprint.items()}
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (SafetensorError, KeyError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{path} is no state of a run: {error!r}. Remove it and start the run anew."
        ) from error
    return StoredState(tensors=tensors, metadata=metadata, fingerprint=values)


def check_same_run(
    path: Path, stored: Mapping[str, str], expected: Mapping[str, str], step: str = "?"
) -> None:
    """Refuse to go on with the state of another run.

    Args:
        path: The state file, to be named.
        stored: The fingerprint in it.
        expected: The fingerprint of the run that is to go on.
        step: Steps that the stored run had done, to be named.

    Raises:
        ValueError: If they differ; names every difference with both values.
    """
    absent = "(not stated)"
    differences = [
        f"{name}: {_shorten(stored.get(name, absent))} there, "
        f"{_shorten(expected.get(name, absent))} now"
        for name in sorted({*stored, *expected})
        if stored.get(name) != expected.get(name)
    ]
    if differences:
        raise ValueError(
            f"{path} is the state of another run, after step {step}:\n  "
            + "\n  ".join(differences)
            + "\nA resumed run must be the same one. Give the same options as before, or start "
            "anew with another --output, or with --overwrite."
        )


def _shorten(value: str) -> str:
    return value if len(value) <= _MAX_SHOWN else value[: _MAX_SHOWN - 3] + "..."
