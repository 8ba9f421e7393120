"""A model of diffusers from a folder on disk, strictly and without the network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_CONFIG = "config.json"
_SHOWN = 4


def load_diffusers_folder(
    model_class: Any, folder: Path, subfolder: str, dtype: torch.dtype
) -> Any:
    """Load a model on the CPU.

    Args:
        model_class: Of diffusers.
        folder: With `config.json` and the weights, or with `subfolder` that has them.
        subfolder: Name of the model's part in a pipeline folder.
        dtype: Of the weights.

    Raises:
        ValueError: If a file is missing or damaged, or weights are missing, unexpected or of
            another shape: diffusers itself would fill them with random numbers.
    """
    name = model_class.__name__
    if not (folder / _CONFIG).is_file() and (folder / subfolder / _CONFIG).is_file():
        folder = folder / subfolder
    if not (folder / _CONFIG).is_file():
        raise ValueError(
            f"{folder} has no {_CONFIG}, and no folder {subfolder!r} with one: expected a folder "
            f"of diffusers' {name}."
        )
    try:
        model, info = model_class.from_pretrained(
            folder,
            torch_dtype=dtype,
            local_files_only=True,
            low_cpu_mem_usage=False,
            output_loading_info=True,
        )
    except Exception as error:  # A damaged folder makes the library raise errors of any class.
        raise ValueError(f"{folder} cannot be loaded as {name}: {error}") from error
    faults = []
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        found = [str(item) for item in info.get(kind) or ()]
        if found:
            more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            faults.append(f"{kind.replace('_', ' ')}: {', '.join(sorted(found)[:_SHOWN])}{more}")
    if faults:
        raise ValueError(f"{folder} does not fit its {name}: {'; '.join(faults)}.")
    return model
