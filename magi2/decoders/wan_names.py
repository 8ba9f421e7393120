"""Names of the original Wan2.2 VAE file, and what diffusers calls the same weights.

diffusers' own conversion of single files knows Wan2.1 only, whose blocks are not nested.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

_TOP = {
    "conv1": "quant_conv",
    "conv2": "post_quant_conv",
    "encoder.conv1": "encoder.conv_in",
    "decoder.conv1": "decoder.conv_in",
    "encoder.head.0": "encoder.norm_out",
    "decoder.head.0": "decoder.norm_out",
    "encoder.head.2": "encoder.conv_out",
    "decoder.head.2": "decoder.conv_out",
}
# Layers of a residual block, numbered because the original holds them in a sequence.
_RESIDUAL = {
    "residual.0": "norm1",
    "residual.2": "conv1",
    "residual.3": "norm2",
    "residual.6": "conv2",
    "shortcut": "conv_shortcut",
}
_MIDDLE = {"0": "resnets.0", "1": "attentions.0", "2": "resnets.1"}
_BLOCK = re.compile(r"(en|de)coder\.(?:down|up)samples\.(\d+)\.(?:down|up)samples\.(\d+)\.(.+)")
_MIDDLE_BLOCK = re.compile(r"(en|de)coder\.middle\.([012])\.(.+)")


def diffusers_names(weights: Mapping[str, Any], source: Path) -> dict[str, torch.Tensor]:
    """Rename the original file's weights; names of diffusers pass as they are.

    Raises:
        ValueError: If the file is that of another VAE, or holds something else than tensors.
    """
    if isinstance(weights.get("model_state"), dict):
        weights = weights["model_state"]
    others = [name for name, value in weights.items() if not isinstance(value, torch.Tensor)]
    if others or not weights:
        raise ValueError(
            f"{source} holds {others[:4] or 'nothing'}: expected the tensors of the Wan2.2 VAE."
        )
    if "decoder.middle.0.residual.0.gamma" in weights and not any(map(_BLOCK.match, weights)):
        raise ValueError(
            f"{source} is the VAE of Wan2.1, with another latent space: expected that of "
            "Wan2.2-TI2V-5B (Wan2.2_VAE.pth)."
        )
    return {diffusers_name(str(name)): tensor for name, tensor in weights.items()}


def diffusers_name(name: str) -> str:
    """What diffusers calls a weight; a name that is none of the original's comes back unchanged."""
    module, _, leaf = name.rpartition(".")
    if module in _TOP:
        return f"{_TOP[module]}.{leaf}"
    if match := _MIDDLE_BLOCK.fullmatch(module):
        side, number, inner = match.groups()
        return f"{side}coder.mid_block.{_MIDDLE[number]}.{_RESIDUAL.get(inner, inner)}.{leaf}"
    if match := _BLOCK.fullmatch(module):
        side, block, number, inner = match.groups()
        way = "down" if side == "en" else "up"
        prefix = f"{side}coder.{way}_blocks.{block}"
        if inner in _RESIDUAL:
            return f"{prefix}.resnets.{number}.{_RESIDUAL[inner]}.{leaf}"
        # The last of a block: `resample.1` or `time_conv`, which keep their names.
        return f"{prefix}.{way}sampler.{inner}.{leaf}"
    return name
