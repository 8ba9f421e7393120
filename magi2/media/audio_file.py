"""Sound to a WAV file, for a run that decodes no video."""

from __future__ import annotations

import io
import wave
from pathlib import Path

import numpy as np
import torch

from magi2.atomic_file import write_atomically
from magi2.media.video_file import check_audio

_LARGEST = 32767


def write_audio(path: str | Path, audio: torch.Tensor, sample_rate: int = 44100) -> None:
    """Write a WAV file of 16-bit samples.

    Args:
        path: The file; its folder exists.
        audio: (channels, samples) float32 in [-1, 1], 1 or 2 channels; values outside are clipped.
        sample_rate: Samples a second.

    Raises:
        ValueError: If the samples are not of this shape and dtype, or the rate is not positive.
        OSError: If the file cannot be written; what was there stays.
    """
    check_audio(audio, sample_rate)
    samples = (audio.cpu().clamp(-1.0, 1.0) * _LARGEST).round().to(torch.int16)
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(audio.shape[0])
        file.setsampwidth(2)
        file.setframerate(sample_rate)
        file.writeframes(samples.T.contiguous().numpy().astype(np.dtype("<i2")).tobytes())
    write_atomically(Path(path), buffer.getvalue())
