"""Text features on disk, for a run without a text encoder: one safetensors file.

| tensor | shape | |
| --- | --- | --- |
| `prompt.features` | (tokens, channels) | must be there |
| `prompt.special_tokens` | (images, channels) | one row for each reference image, if any |
| `negative.features` | (tokens, channels) | may be missing: no negative prompt |

All of one floating type; the released encoder makes bfloat16 with 5120 channels.
"""

from __future__ import annotations

from pathlib import Path

import torch

from magi2.checkpoint.shard_file import ShardFile, write_shard
from magi2.encoders.text_features import TextFeatures

_PROMPT = "prompt.features"
_SPECIAL = "prompt.special_tokens"
_NEGATIVE = "negative.features"
_PARTIAL = ".partial"


def save_text_features(
    path: str | Path, prompt: TextFeatures, negative: TextFeatures | None = None
) -> None:
    """Write the features of a prompt, and of a negative prompt if there is one.

    Args:
        path: The file; replaced as a whole if it exists.
        prompt: On any device.
        negative: Its special tokens, if any, are not stored: both branches of guidance use the
            prompt's.

    Raises:
        ValueError: If the two have different channels or dtypes.
        OSError: If the file cannot be written; what was there stays.
    """
    tensors = {_PROMPT: prompt.features}
    if prompt.special_tokens:
        tensors[_SPECIAL] = torch.stack(prompt.special_tokens)
    if negative is not None:
        tensors[_NEGATIVE] = negative.features
    path = Path(path)
    _check_agreement(path, tensors)
    partial = path.with_name(path.name + _PARTIAL)
    try:
        write_shard(partial, tensors.items())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def load_text_features(path: str | Path) -> tuple[TextFeatures, TextFeatures | None]:
    """Read what `save_text_features` wrote, or another program in the same layout.

    Returns:
        The prompt's features and the negative prompt's, None if the file has none; on the CPU, in
        the dtype of the file.

    Raises:
        ValueError: If the file cannot be read, is no safetensors file, lacks the prompt, holds
            other tensors, or their shapes, dtypes or values cannot be features.
    """
    path = Path(path)
    file = ShardFile(path)
    _check_names(path, set(file.tensors))
    # Clones: the tensors outlive the file, which may be replaced.
    tensors = {name: file.read(name).clone() for name in file.tensors}
    _check_agreement(path, tensors)
    special_tokens = tuple(tensors[_SPECIAL].unbind()) if _SPECIAL in tensors else ()
    try:
        prompt = TextFeatures(features=tensors[_PROMPT], special_tokens=special_tokens)
        negative = TextFeatures(features=tensors[_NEGATIVE]) if _NEGATIVE in tensors else None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return prompt, negative


def _check_names(path: Path, found: set[str]) -> None:
    unexpected = sorted(found - {_PROMPT, _SPECIAL, _NEGATIVE})
    if unexpected or _PROMPT not in found:
        raise ValueError(
            f"{path} holds the tensors {sorted(found)}: expected {_PROMPT!r}, and beside it at "
            f"most {_SPECIAL!r} and {_NEGATIVE!r}. Write it with save_text_features."
        )


def _check_agreement(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    prompt = tensors[_PROMPT]
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or not tensor.is_floating_point():
            raise ValueError(
                f"{path}: {name} is {tuple(tensor.shape)} {tensor.dtype}: expected two dimensions "
                "of a floating type, without a batch dimension."
            )
        if tensor.shape[1] != prompt.shape[1] or tensor.dtype != prompt.dtype:
            raise ValueError(
                f"{path}: {name} is {tuple(tensor.shape)} {tensor.dtype} and {_PROMPT} "
                f"{tuple(prompt.shape)} {prompt.dtype}: expected the same channels and dtype."
            )
    if not prompt.shape[0]:
        raise ValueError(f"{path}: {_PROMPT} has no tokens: expected one row for each.")
