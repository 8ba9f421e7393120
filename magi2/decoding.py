"""The decoders that a run has, loaded early so that a damaged one costs no sampling."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from magi2.geometry import SPATIAL_STRIDE, TEMPORAL_STRIDE
from magi2.release import Release

if TYPE_CHECKING:
    from magi2.decoders.audio import AudioDecoder
    from magi2.decoders.turbo import TurboDecoder
    from magi2.decoders.wan import VideoVae

# What the latents of the released model stand for.
_PIXELS, _FRAMES, _SAMPLES = SPATIAL_STRIDE, TEMPORAL_STRIDE, 2048
_WEIGHTS = ("*.safetensors", "*.pt", "*.pth", "*.ckpt", "*.bin")


@dataclass(frozen=True, kw_only=True)
class Decoders:
    """What turns latents into frames and sound; on the CPU until it is used.

    Args:
        turbo: The distilled video decoder, which goes first.
        vae: The full video decoder.
        audio: The audio decoder.
    """

    turbo: TurboDecoder | None = None
    vae: VideoVae | None = None
    audio: AudioDecoder | None = None

    @property
    def video_name(self) -> str | None:
        """What decodes the video; None for nothing."""
        return "turbo decoder" if self.turbo else "Wan2.2 video VAE" if self.vae else None

    def decode_video(self, latent: torch.Tensor, device: torch.device) -> torch.Tensor | None:
        """Frames of a latent.

        Args:
            latent: (video channels, frames, rows, columns) float32.
            device: Where to decode.

        Returns:
            (4 * frames - 3, height, width, 3) uint8 on the CPU; None without a decoder.
        """
        if self.turbo is not None:
            from magi2.decoders.turbo import decode_turbo

            return decode_turbo(self.turbo.to(device), latent)
        if self.vae is not None:
            from magi2.decoders.wan import decode_with_vae

            return decode_with_vae(_moved(self.vae, device), latent)
        return None

    def decode_audio(self, latent: torch.Tensor, device: torch.device) -> torch.Tensor | None:
        """Sound of a latent.

        Args:
            latent: (audio latents, audio channels) float32.
            device: Where to decode.

        Returns:
            (sound channels, samples) float32 on the CPU; None without a decoder.
        """
        if self.audio is None:
            return None
        from magi2.decoders.audio import decode_audio

        return decode_audio(_moved(self.audio, device), latent)


def load_decoders(release: Release) -> Decoders:
    """Load the decoders that are there, to the CPU, and check that they take these latents.

    Raises:
        ValueError: If one is damaged, or made for other latents.
    """
    parts, config = release.parts, release.config
    turbo = vae = audio = None
    if "turbo_decoder" in parts:
        turbo = _load_turbo(parts["turbo_decoder"])
        given = turbo.config.latent_channels
        _check_channels(parts["turbo_decoder"], "video", given, config.video_channels)
        _check_scale(parts["turbo_decoder"], "pixels a side", turbo.config.spatial_scale, _PIXELS)
    elif "video_vae" in parts:
        from magi2.decoders.wan import load_video_vae

        vae = load_video_vae(parts["video_vae"])
        _check_channels(parts["video_vae"], "video", vae.config.z_dim, config.video_channels)
        scale = vae.config.scale_factor_spatial
        _check_scale(parts["video_vae"], "pixels a side", scale, _PIXELS)
        scale = vae.config.scale_factor_temporal
        _check_scale(parts["video_vae"], "frames", scale, _FRAMES)
    if "audio_vae" in parts:
        from magi2.decoders.audio import load_audio_decoder

        audio = load_audio_decoder(parts["audio_vae"])
        given = audio.config.decoder_input_channels
        _check_channels(parts["audio_vae"], "audio", given, config.audio_channels)
        scale = math.prod(audio.config.downsampling_ratios)
        _check_scale(parts["audio_vae"], "samples", scale, _SAMPLES)
        if audio.config.audio_channels not in (1, 2):
            raise ValueError(
                f"{parts['audio_vae']} makes sound of {audio.config.audio_channels} channels: "
                "expected 1 or 2, which files of sound have. Leave it out, or take another."
            )
    return Decoders(turbo=turbo, vae=vae, audio=audio)


def _load_turbo(path: Path) -> TurboDecoder:
    from magi2.decoders.turbo import load_turbo_decoder

    if not path.is_dir():
        beside = path.with_suffix(".json")
        return load_turbo_decoder(path, config=beside if beside.exists() else None)
    weights = sorted(found for pattern in _WEIGHTS for found in path.glob(pattern))
    configs = sorted(path.glob("*.json"))
    if len(weights) != 1 or len(configs) > 1:
        raise ValueError(
            f"{path} holds {[p.name for p in weights]} and {[p.name for p in configs]}: expected "
            "one file of weights, and at most one JSON file with the decoder's sizes. Name the "
            "weights with --turbo-decoder."
        )
    return load_turbo_decoder(weights[0], config=configs[0] if configs else None)


def _check_channels(path: Path, kind: str, given: int, expected: int) -> None:
    if given != expected:
        raise ValueError(
            f"{path} decodes {kind} latents of {given} channels, and this checkpoint makes "
            f"{expected}: expected the decoder of its latent space. Leave it out, or take the one "
            "that belongs to it."
        )


def _check_scale(path: Path, what: str, given: int, expected: int) -> None:
    if given != expected:
        raise ValueError(
            f"{path} makes {given} {what} of a latent: expected {expected}. Leave it out, or take "
            "the decoder that belongs to this checkpoint."
        )


def _moved(decoder: Any, device: torch.device) -> Any:
    # The protocols of these decoders leave out that they are modules.
    return decoder.to(device)
