"""A tiny checkpoint with text features, requests for it, and a run that is stopped on purpose."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from magi2 import presets
from magi2.checkpoint import save_checkpoint
from magi2.config import Magi2Config
from magi2.encoders.features_file import save_text_features
from magi2.encoders.text_features import TextFeatures
from magi2.generate_request import GenerateRequest
from magi2.initialise import random_state_dict

NUM_STEPS = 4
SIZES = {"width": 48, "height": 32, "num_frames": 5}


def config(**changes: object) -> Magi2Config:
    return dataclasses.replace(presets.tiny_uneven(), **changes)


def features(channels: int, lengths=(7, 5), num_images: int = 0) -> list[TextFeatures]:
    """Random features of a prompt and of a negative prompt."""
    generator = torch.Generator().manual_seed(1)
    prompt, negative = (torch.randn(n, channels, generator=generator).bfloat16() for n in lengths)
    special = torch.randn(num_images, channels, generator=generator).bfloat16()
    return [
        TextFeatures(features=prompt, special_tokens=tuple(special)),
        TextFeatures(features=negative),
    ]


def make_checkpoint(folder: Path, **changes: object) -> Path:
    """Shards, config.json and text features."""
    whole = config(**changes)
    save_checkpoint(random_state_dict(whole), whole, folder, max_shard_bytes=1 << 20)
    save_text_features(folder / "text_features.safetensors", *features(whole.text_channels))
    return folder


def request(output: Path, **changes: object) -> GenerateRequest:
    settings = {"num_inference_steps": NUM_STEPS, **changes.pop("settings", {})}
    return GenerateRequest(output=output, settings=settings, **{**SIZES, **changes})


class StopAt:
    """Progress that raises once a step is done and saved."""

    def __init__(self, step: int, error: BaseException | None = None) -> None:
        self.at = step
        self.error = error or KeyboardInterrupt()
        self.steps: list[int] = []

    def phase(self, text: str) -> None:
        pass

    def step(self, done: int, total: int, seconds: float) -> None:
        self.steps.append(done)
        if done == self.at:
            raise self.error
