"""Frames and sound to an MP4 file."""

from __future__ import annotations

import io
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

from magi2.atomic_file import write_atomically
from magi2.checks import describe
from magi2.extras import require

# Samples of one AAC packet; the encoder cuts what it is given to this anyway.
_AUDIO_BLOCK = 1024
# Visually lossless at these sizes; the hashes of a run are of the raw frames, never of the file.
_QUALITY = "16"


def write_video(
    path: str | Path,
    frames: torch.Tensor,
    fps: float | Fraction,
    audio: torch.Tensor | None = None,
    sample_rate: int = 44100,
) -> None:
    """Write an MP4 file: H.264 video, and AAC sound if there is any.

    The file is made in memory and then put in its place as a whole.

    Args:
        path: The file; its folder exists.
        frames: (frames, height, width, 3) uint8 RGB; even height and width.
        fps: Frames a second; 12.5 is exact.
        audio: (channels, samples) float32 in [-1, 1], 1 or 2 channels; values outside are clipped.
        sample_rate: Samples a second.

    Raises:
        ValueError: If the frames or samples are not of these shapes and dtypes, or a rate is not
            positive.
        OSError: If the file cannot be written; what was there stays.
        RuntimeError: If FFmpeg refuses them, as for sides of more pixels than H.264 has.
        ModuleNotFoundError: If PyAV is not installed.
    """
    _check_frames(frames, fps)
    if audio is not None:
        check_audio(audio, sample_rate)
    av = require_encoder()
    try:
        data = _encode(av, frames, fps, audio, sample_rate)
    except av.error.FFmpegError as error:
        raise RuntimeError(
            f"FFmpeg cannot make {path} of frames that are {describe(frames)}, {float(fps):g} a "
            f"second: {error}. H.264 takes up to 16384 pixels a side."
        ) from error
    write_atomically(Path(path), data)


def require_encoder() -> Any:
    """PyAV, with the encoder that `write_video` uses.

    Raises:
        ModuleNotFoundError: If it is not installed.
        RuntimeError: If its build has no libx264.
    """
    av = require("av", "writing MP4 files")
    if "libx264" not in av.codec.codecs_available:
        raise RuntimeError(
            "This build of PyAV has no libx264 encoder: install the wheel from PyPI "
            "(pip install --force-reinstall av)."
        )
    return av


def _encode(
    av: Any,
    frames: torch.Tensor,
    fps: float | Fraction,
    audio: torch.Tensor | None,
    sample_rate: int,
) -> bytes:
    """The bytes of the file."""
    buffer = io.BytesIO()
    with av.open(buffer, mode="w", format="mp4") as container:
        video_stream = _add_video(container, frames, fps)
        # All streams before the first packet: the header lists them.
        audio_stream = None if audio is None else _add_audio(container, audio, sample_rate)
        for frame in frames.cpu().numpy():
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
            container.mux(video_stream.encode(picture))
        container.mux(video_stream.encode())
        if audio is not None:
            encode_audio(av, container, audio_stream, audio)
    return buffer.getvalue()


def encode_audio(av: Any, container: Any, stream: Any, audio: torch.Tensor) -> None:
    """Feed checked samples to a stream of a container, in blocks."""
    samples = audio.cpu().clamp(-1.0, 1.0).numpy()
    layout = "stereo" if samples.shape[0] == 2 else "mono"
    for start in range(0, samples.shape[1], _AUDIO_BLOCK):
        block = np.ascontiguousarray(samples[:, start : start + _AUDIO_BLOCK])
        frame = av.AudioFrame.from_ndarray(block, format="fltp", layout=layout)
        frame.sample_rate = stream.rate
        frame.pts = start
        frame.time_base = Fraction(1, stream.rate)
        container.mux(stream.encode(frame))
    container.mux(stream.encode())


def check_audio(audio: torch.Tensor, sample_rate: int) -> None:
    """Samples as the files take them.

    Raises:
        ValueError: If they are not (1 or 2, samples) finite float32, or the rate is not positive.
    """
    if audio.dim() != 2 or audio.shape[0] not in (1, 2) or not audio.shape[1]:
        raise ValueError(
            f"audio is {describe(audio)}: expected (channels, samples) with 1 or 2 channels."
        )
    if audio.dtype != torch.float32:
        raise ValueError(f"audio is {audio.dtype}: expected float32 in [-1, 1].")
    if not bool(audio.isfinite().all()):
        raise ValueError("audio holds NaN or infinity: nothing that can be played.")
    if sample_rate <= 0:
        raise ValueError(f"sample_rate={sample_rate}: expected a positive number, such as 44100.")


def _add_video(container: Any, frames: torch.Tensor, fps: float | Fraction) -> Any:
    # 1001: the denominator of broadcast rates such as 30000/1001.
    stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001))
    stream.height, stream.width = frames.shape[1:3]
    stream.pix_fmt = "yuv420p"
    stream.options = {"crf": _QUALITY, "preset": "medium"}
    return stream


def _add_audio(container: Any, audio: torch.Tensor, sample_rate: int) -> Any:
    layout = "stereo" if audio.shape[0] == 2 else "mono"
    stream = container.add_stream("aac", rate=sample_rate, layout=layout)
    stream.bit_rate = 192_000
    return stream


def _check_frames(frames: torch.Tensor, fps: float | Fraction) -> None:
    if frames.dim() != 4 or frames.shape[3] != 3 or frames.dtype != torch.uint8:
        raise ValueError(
            f"frames is {describe(frames)}: expected (frames, height, width, 3) torch.uint8."
        )
    num_frames, height, width = frames.shape[:3]
    if not num_frames or not height or not width or height % 2 or width % 2:
        raise ValueError(
            f"frames is {describe(frames)}: expected at least one frame, and even height and "
            "width, since H.264 stores colour for 2 x 2 pixels."
        )
    if not math.isfinite(fps) or fps <= 0:
        raise ValueError(f"fps={fps}: expected a positive number, such as 12.5.")
