"""Weights of decoders: read from one file of either common format, and loaded strictly."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from magi2.checkpoint.shard_file import ShardFile

_SHOWN = 4


def read_weights(path: Path) -> dict[str, Any]:
    """A `.safetensors` file's tensors, or what `torch.save` put into any other file; on the CPU.

    Raises:
        ValueError: If the file is missing or damaged, or holds more than tensors and plain values,
            which would mean running code from it.
    """
    if path.suffix == ".safetensors":
        file = ShardFile(path)
        return {name: file.read(name) for name in file.tensors}
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}.") from error
    except Exception as error:  # A damaged pickle makes torch raise errors of any class.
        raise ValueError(
            f"{path} is damaged, or no file of weights that is safe to load: expected a "
            ".safetensors file, or a torch.save of tensors and plain values. Fetch it again, or "
            "convert it where you trust its origin."
        ) from error
    if not isinstance(loaded, dict) or not all(isinstance(name, str) for name in loaded):
        kinds = {type(name).__name__ for name in loaded} if isinstance(loaded, dict) else ()
        names = f" with names of type {', '.join(sorted(kinds))}" if kinds else ""
        raise ValueError(
            f"{path} holds an object of type {type(loaded).__name__}{names}: expected a dict of "
            "tensors by name."
        )
    return loaded


def load_strictly(
    model: nn.Module, weights: Mapping[str, Any], source: Path, dtype: torch.dtype
) -> None:
    """Put weights into a model on "meta", in one dtype; the model then is on the CPU.

    Raises:
        ValueError: If weights are missing, unexpected, no tensors or of another shape; all kinds
            are named.
    """
    expected = model.state_dict()
    others = [str(n) for n, value in weights.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise ValueError(f"{source} does not fit the model; {_listed('no tensors', others)[0]}.")
    faults = _listed("missing", [name for name in expected if name not in weights])
    faults += _listed("unexpected", [name for name in weights if name not in expected])
    faults += _listed(
        "of another shape",
        [
            f"{name} {tuple(weights[name].shape)}, expected {tuple(tensor.shape)}"
            for name, tensor in expected.items()
            if name in weights and weights[name].shape != tensor.shape
        ],
    )
    if faults:
        raise ValueError(f"{source} does not fit the {type(model).__name__}: {'; '.join(faults)}.")
    cast = {name: tensor.to(dtype) for name, tensor in weights.items()}
    model.load_state_dict(cast, strict=True, assign=True)


def _listed(kind: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"{kind}: {', '.join(names[:_SHOWN])}{more}"]
