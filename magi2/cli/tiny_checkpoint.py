"""`magi2 make-tiny-checkpoint`: something small to try everything else with."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

TEXT_FEATURES_NAME = "text_features.safetensors"
_PROMPT_TOKENS, _NEGATIVE_TOKENS = 11, 5


class Preset(str, Enum):
    """Configurations that fit in a test."""

    tiny = "tiny"
    tiny_uneven = "tiny_uneven"


def make_tiny_checkpoint(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="Made if absent; must not hold a checkpoint yet."),
    ],
    preset: Annotated[
        Preset,
        typer.Option(help="tiny: 8 attention heads, 4 of the mixture; tiny_uneven: 6 and 3."),
    ] = Preset.tiny,
    seed: Annotated[int, typer.Option(min=0, help="Of the weights and features.")] = 0,
    shard_mib: Annotated[float, typer.Option(help="Largest shard, in MiB.")] = 4.0,
) -> None:
    """Write a random checkpoint in the released layout, and text features beside it.

    What it generates is noise; every step from features to files is run as with the real weights.
    """
    from magi2 import presets
    from magi2.checkpoint import save_checkpoint
    from magi2.initialise import random_state_dict

    config = {"tiny": presets.tiny, "tiny_uneven": presets.tiny_uneven}[preset.value]()
    weights = random_state_dict(config, seed)
    save_checkpoint(weights, config, folder, int(shard_mib * 2**20))
    write_text_features(folder / TEXT_FEATURES_NAME, config.text_channels, seed)
    elements = sum(tensor.numel() for tensor in weights.values())
    num_shards = len(list(folder.glob("model-*.safetensors")))
    typer.echo(
        f"{folder}: {len(weights)} tensors of {elements:,} random elements in {num_shards} "
        f"shards, and {TEXT_FEATURES_NAME} with features of {_PROMPT_TOKENS} and "
        f"{_NEGATIVE_TOKENS} tokens.\nNext: magi2 inspect {folder}"
    )


def write_text_features(path: Path, channels: int, seed: int) -> None:
    """Features of a prompt and of a shorter negative prompt, random, bfloat16."""
    import torch

    from magi2.encoders.features_file import save_text_features
    from magi2.encoders.text_features import TextFeatures

    generator = torch.Generator().manual_seed(seed)
    prompt, negative = (
        TextFeatures(features=torch.randn(tokens, channels, generator=generator).bfloat16())
        for tokens in (_PROMPT_TOKENS, _NEGATIVE_TOKENS)
    )
    save_text_features(path, prompt, negative)
