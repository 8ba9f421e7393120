"""From shards on disk into a model, strictly."""

from __future__ import annotations

from pathlib import Path

import torch

from magi2.checkpoint.index import Checkpoint, list_names, open_checkpoint, raise_faults
from magi2.checkpoint.slices import full_shape, rows_to_read
from magi2.transformer import Magi2Transformer

# Elements looked at for NaN at a time: the expert stacks hold 10**9.
_NAN_CHUNK = 1 << 24


def load_checkpoint(
    model: Magi2Transformer, folder: str | Path, device: torch.device | str | None = None
) -> None:
    """Fill a model from a checkpoint folder; each rank reads only the rows that it holds.

    Values are cast to the model's dtypes. Both router biases are loaded as they are; the model's
    options say which one chooses experts.

    Args:
        model: On any device. On "meta" it is first allocated on `device`.
        folder: With an index and the shards that it names.
        device: Where a model on "meta" goes; None for the CPU. Must be None for another model.

    Raises:
        ValueError: If tensors are missing, unexpected, of another shape or not floating, or a
            file is missing, truncated or malformed: before the model is touched, all faults
            listed. If a tensor holds NaN: all such tensors listed, the model then holds what was
            read.
    """
    checkpoint = open_checkpoint(folder)
    _check_names_and_shapes(model, checkpoint)
    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device=device or "cpu")
    elif device is not None:
        raise ValueError(
            f"device={device} was given for a model that is not on 'meta': move it with "
            "model.to(), or build it with device='meta'."
        )
    poisoned = []
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            rows = rows_to_read(name, model.expert_heads, model.config.moe.num_experts)
            stored = checkpoint.file_of[name].read(name, rows)
            if _has_nan(stored):
                poisoned.append(name)
            tensor.copy_(stored)
    raise_faults(checkpoint.folder, list_names("NaN in", poisoned))


def _check_names_and_shapes(model: Magi2Transformer, checkpoint: Checkpoint) -> None:
    moe = model.config.moe
    expected = {
        name: full_shape(name, tuple(tensor.shape), moe.num_heads, moe.num_experts)
        for name, tensor in model.state_dict().items()
    }
    given = checkpoint.file_of
    faults = list_names("missing", [name for name in expected if name not in given])
    faults += list_names("unexpected", [name for name in given if name not in expected])
    for name, shape in expected.items():
        if name in given:
            stored = given[name].tensors[name]
            if stored.shape != shape:
                faults.append(
                    f"{name} has shape {list(stored.shape)}, the model expects {list(shape)}"
                )
            elif not stored.dtype.is_floating_point:
                faults.append(f"{name} is {stored.dtype}, expected a floating type")
    raise_faults(checkpoint.folder, faults)


def _has_nan(tensor: torch.Tensor) -> bool:
    return any(bool(chunk.isnan().any()) for chunk in tensor.flatten().split(_NAN_CHUNK))
