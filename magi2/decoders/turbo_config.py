"""Sizes of the turbo decoder, from the JSON file beside its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from magi2.checks import parse_json, whole_numbers

# Keys of the file, by the field that they fill.
_LISTS = {
    "block_channels": "decoder_block_out_channels",
    "layers_per_block": "decoder_layers_per_block",
}
_FLAGS = {
    "upsamples": "decoder_spatio_temporal_scaling",
    "spatial_only": "decoder_spatio_only",
}
_NUMBERS = {
    "latent_channels": "latent_channels",
    "patch_size": "patch_size",
    "first_chunk_size": "first_chunk_size",
    "step_size": "step_size",
}


@dataclass(frozen=True, kw_only=True)
class TurboConfig:
    """Sizes of a turbo decoder; lists run from the widest picture to the latent, as in the file.

    Args:
        latent_channels: Channels of the latent.
        block_channels: Channels of each block.
        layers_per_block: Residual blocks of each block; the last entry is the middle block's.
        upsamples: Whether a block doubles height and width.
        spatial_only: Whether one that does leaves the number of frames.
        patch_size: Pixels of the output for each value, along height and width.
        first_chunk_size: Latent frames that the first window decodes.
        step_size: Latent frames that each further window decodes.

    Raises:
        ValueError: If a number is not positive, the lists do not fit together, or the decoder
            would not make 4 frames of one.
    """

    latent_channels: int
    block_channels: tuple[int, ...]
    layers_per_block: tuple[int, ...]
    upsamples: tuple[bool, ...]
    spatial_only: tuple[bool, ...]
    patch_size: int
    first_chunk_size: int
    step_size: int

    def __post_init__(self) -> None:
        blocks = len(self.block_channels)
        if not blocks or not len(self.upsamples) == len(self.spatial_only) == blocks:
            raise ValueError(
                f"{blocks} block_channels, {len(self.upsamples)} upsamples and "
                f"{len(self.spatial_only)} spatial_only: expected one of each for every block."
            )
        if len(self.layers_per_block) != blocks + 1:
            raise ValueError(
                f"{len(self.layers_per_block)} layers_per_block for {blocks} blocks: expected one "
                "more, for the middle block."
            )
        numbers = [getattr(self, name) for name in _NUMBERS]
        if min(*numbers, *self.block_channels, *self.layers_per_block) < 1:
            raise ValueError(f"{self} holds a number below 1: expected positive sizes.")
        if self.temporal_scale != 4:
            raise ValueError(
                f"upsamples={self.upsamples} with spatial_only={self.spatial_only} makes "
                f"{self.temporal_scale} frames of one: expected 4, so two blocks that upsample "
                "and are not spatial_only."
            )

    @property
    def temporal_scale(self) -> int:
        """Frames for each latent frame, after the first window."""
        pairs = zip(self.upsamples, self.spatial_only, strict=True)
        return int(2 ** sum(up and not flat for up, flat in pairs))

    @property
    def spatial_scale(self) -> int:
        """Pixels for each latent, along height and along width."""
        return int(2 ** sum(self.upsamples)) * self.patch_size

    @classmethod
    def released(cls) -> TurboConfig:
        """The released decoder's: `TurboV3-Wan22-TinyShallow_7_7.json`."""
        return cls(
            latent_channels=48,
            block_channels=(64, 128, 256, 512),
            layers_per_block=(2, 2, 2, 3, 3),
            upsamples=(False, True, True, True),
            spatial_only=(False, True, False, False),
            patch_size=2,
            first_chunk_size=7,
            step_size=7,
        )

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> TurboConfig:
        """Read the fields of the JSON file.

        Keys that do not begin with `decoder_` describe the encoder or the training and are left
        alone.

        Raises:
            ValueError: If a key is missing or malformed, or a decoder option is on that this
                decoder does not have.
        """
        _check_keys(document)
        fields: dict[str, Any] = {}
        for field, key in _LISTS.items():
            fields[field] = whole_numbers(key, document[key])
        for field, key in _FLAGS.items():
            flags = document[key]
            if not isinstance(flags, list) or not all(isinstance(flag, bool) for flag in flags):
                raise ValueError(f"{key}={flags!r}: expected a list of true and false.")
            fields[field] = tuple(flags)
        for field, key in _NUMBERS.items():
            (fields[field],) = whole_numbers(key, [document[key]])
        return cls(**fields)

    @classmethod
    def from_file(cls, path: str | Path) -> TurboConfig:
        """Read the JSON file.

        Raises:
            ValueError: If it cannot be read, is no JSON object, or as `from_dict`.
        """
        try:
            document = parse_json(Path(path).read_bytes())
            if not isinstance(document, dict):
                raise ValueError("expected a JSON object.")
            return cls.from_dict(document)
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}.") from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def _check_keys(document: Mapping[str, Any]) -> None:
    """Whether all keys are there, and none asks for what this decoder does not have."""
    needed = {**_LISTS, **_FLAGS, **_NUMBERS}
    missing = [key for key in needed.values() if key not in document]
    if missing:
        raise ValueError(f"The turbo decoder's config lacks {', '.join(missing)}.")
    if document.get("use_unpatchify", True) is not True:
        raise ValueError(
            f"use_unpatchify={document['use_unpatchify']!r}: expected true, the only output "
            "that is supported."
        )
    foreign = [
        key
        for key, value in document.items()
        if key.startswith("decoder_") and key not in needed.values() and _is_on(value)
    ]
    if foreign:
        raise ValueError(
            f"The turbo decoder's config turns on {', '.join(sorted(foreign))}: expected "
            "these to be false, as released; other decoders are not supported."
        )


def _is_on(value: object) -> bool:
    """Whether an option is true; numbers and names are told apart by the weights' shapes."""
    return any(map(_is_on, value)) if isinstance(value, list) else value is True
