"""From latents to what the user opens: frames, sound, files and their hashes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from magi2.decoding import Decoders
from magi2.extras import require
from magi2.hashes import raw_sha256
from magi2.media.video_file import require_encoder
from magi2.output_folder import AUDIO_NAME, VIDEO_NAME, OutputFolder
from magi2.release import Release


@dataclass(frozen=True, kw_only=True)
class Results:
    """What was written.

    Args:
        hashes: SHA-256 of raw bytes: `video_latent` and `audio_latent`, and where they were
            decoded `video_frames` and `audio_samples`.
        files: In the order in which they were written.
        notes: What the run did without, in sentences.
    """

    hashes: Mapping[str, str]
    files: tuple[Path, ...]
    notes: tuple[str, ...]


def require_packages(*, decodes_video: bool, decodes_audio: bool) -> None:
    """Miss now, not after hours of sampling, what decoding and writing will need.

    Args:
        decodes_video: Whether frames are decoded; a preview is drawn where they are not.
        decodes_audio: The same of sound.

    Raises:
        ModuleNotFoundError: If a package is not installed.
        RuntimeError: If PyAV has no H.264.
    """
    require_encoder()
    if decodes_audio:
        require("scipy.signal", "resampling sound")
    if not (decodes_video and decodes_audio):
        require("PIL.Image", "drawing previews", "pillow")
        require("matplotlib.figure", "drawing previews")


def write_results(
    output: OutputFolder,
    video: torch.Tensor,
    audio: torch.Tensor,
    decoders: Decoders,
    *,
    release: Release,
    device: torch.device,
    facts: Mapping[str, object],
    fps: float,
) -> Results:
    """Write the latents, decode what can be decoded, and show the rest as a preview.

    Args:
        output: Where to.
        video: (video channels, frames, rows, columns) float32, on the CPU.
        audio: (audio latents, audio channels) float32, on the CPU.
        decoders: What there is.
        release: Knows what is missing.
        device: Where to decode.
        facts: About the run, for its record.
        fps: Frames a second.

    Raises:
        OSError: If a file cannot be written; the run's state stays then.
    """
    hashes = {"video_latent": raw_sha256(video), "audio_latent": raw_sha256(audio)}
    # First, and at once: whatever happens to the rest, the result of the sampling is safe.
    files = [output.write_latents(video, audio, hashes)]
    frames = decoders.decode_video(video, device)
    samples = decoders.decode_audio(audio, device)
    if frames is not None:
        hashes["video_frames"] = raw_sha256(frames)
    if samples is not None:
        hashes["audio_samples"] = raw_sha256(samples)
    files += _write_media(output.path, frames, samples, fps)
    if frames is None or samples is None:
        files += _write_preview(output.path, video, audio, samples)
    notes = _notes(release, decoders)
    record = {
        **facts,
        "hashes": hashes,
        "files": [path.name for path in files],
        "video_decoder": decoders.video_name,
        "notes": notes,
    }
    files.append(output.finish(record))
    return Results(hashes=hashes, files=tuple(files), notes=tuple(notes))


def _write_media(
    folder: Path, frames: torch.Tensor | None, samples: torch.Tensor | None, fps: float
) -> list[Path]:
    if frames is not None:
        from magi2.media.video_file import write_video

        write_video(folder / VIDEO_NAME, frames, fps, samples)
        return [folder / VIDEO_NAME]
    if samples is not None:
        from magi2.media.audio_file import write_audio

        write_audio(folder / AUDIO_NAME, samples)
        return [folder / AUDIO_NAME]
    return []


def _write_preview(
    folder: Path, video: torch.Tensor, audio: torch.Tensor, samples: torch.Tensor | None
) -> list[Path]:
    from magi2.media.preview import write_preview

    return write_preview(folder, video, audio, waveform=samples)


def _notes(release: Release, decoders: Decoders) -> list[str]:
    """What the outputs lack, and why."""
    missing = {part.key: part for part in release.missing()}
    notes = []
    if decoders.video_name is None:
        notes.append(
            "The video is not decoded, the pictures are a preview of its latent: "
            f"{release.explain(missing['turbo_decoder'])}."
        )
    elif decoders.turbo is None:
        notes.append(
            "The frames come from the full Wan2.2 video VAE, not from the released turbo decoder: "
            f"{release.explain(missing['turbo_decoder'])}."
        )
    if decoders.audio is None:
        notes.append(f"The sound is not decoded: {release.explain(missing['audio_vae'])}.")
    return notes
