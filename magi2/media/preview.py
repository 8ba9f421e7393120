"""What a run shows when nothing decodes its latents: pictures of the latents, labelled as such."""

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
from magi2.media.latent_picture import enlarge, latent_colours
from magi2.media.video_file import check_audio, write_video

LABEL = "Preview of latents - not decoded video or sound"
# Four shown frames a latent, at 12.5 frames a second.
_LATENT_FPS = Fraction(25, 8)
_AUDIO_LATENTS_PER_SECOND = 25.0
_WIDTH = 448
_SHEET_WIDTH = 224
_SHEET_FRAMES = 12
_SHEET_COLUMNS = 4
_BAR = 24
_GAP = 8
_BACKGROUND, _INK = (24, 24, 24), (240, 240, 240)


def write_preview(
    folder: str | Path,
    video_latent: torch.Tensor,
    audio_latent: torch.Tensor,
    *,
    label: str = LABEL,
    waveform: torch.Tensor | None = None,
    sample_rate: int = 44100,
) -> list[Path]:
    """Write pictures of latents; each says on it that it shows latents.

    `preview_latents.png` is a sheet of at most 12 frames, evenly spaced; `preview_latents.mp4` all
    of them, at the speed of the clip; `preview_audio.png` the audio latent over time, and the
    waveform if it was decoded.

    Args:
        folder: Made if absent.
        video_latent: (channels, frames, rows, columns), floating, any device.
        audio_latent: (frames, channels), floating, any device.
        label: Stands on every picture.
        waveform: (channels, samples) float32 of decoded sound, 1 or 2 channels.
        sample_rate: The waveform's samples a second.

    Returns:
        The files, in the order above.

    Raises:
        ValueError: If a latent or the waveform is not of these shapes, or not finite.
        OSError: If a file cannot be written.
        ModuleNotFoundError: If Pillow, PyAV or matplotlib is not installed.
    """
    _check("video_latent", video_latent, 4, "(channels, frames, rows, columns)")
    _check("audio_latent", audio_latent, 2, "(frames, channels)")
    if waveform is not None:
        check_audio(waveform, sample_rate)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    sheet_path = folder / "preview_latents.png"
    video_path = folder / "preview_latents.mp4"
    audio_path = folder / "preview_audio.png"
    colours = latent_colours(video_latent)
    write_atomically(sheet_path, _png(_contact_sheet(colours, label)))
    write_video(video_path, _labelled_frames(colours, label), _LATENT_FPS)
    write_atomically(audio_path, _audio_plot(audio_latent, waveform, sample_rate, label))
    return [sheet_path, video_path, audio_path]


def _check(name: str, latent: torch.Tensor, dims: int, expected: str) -> None:
    if latent.dim() != dims or not latent.is_floating_point() or not latent.numel():
        raise ValueError(
            f"{name} is {describe(latent)}: expected {expected} of a floating type, not empty, "
            "without a batch dimension."
        )
    if not bool(latent.isfinite().all()):
        raise ValueError(f"{name} holds NaN or infinity: there is nothing to show.")


def _contact_sheet(colours: torch.Tensor, label: str) -> Any:
    """Frames in rows of four, each with its number, under a bar with the label."""
    image_module = require("PIL.Image", "drawing previews", "pillow")
    draw_module = require("PIL.ImageDraw", "drawing previews", "pillow")
    num_frames = colours.shape[0]
    shown = min(num_frames, _SHEET_FRAMES)
    picked = torch.linspace(0, num_frames - 1, shown).round().long()
    tiles = enlarge(colours[picked], _SHEET_WIDTH).numpy()
    height, width = tiles.shape[1:3]
    columns = min(shown, _SHEET_COLUMNS)
    rows = math.ceil(shown / columns)
    font = _font(15)
    sheet_width = max(columns * (width + _GAP) + _GAP, math.ceil(font.getlength(label)) + 2 * _GAP)
    sheet = image_module.new(
        "RGB", (sheet_width, _BAR + rows * (height + _BAR) + _GAP), _BACKGROUND
    )
    draw = draw_module.Draw(sheet)
    draw.text((_GAP, 4), label, fill=_INK, font=font)
    for index, (frame, tile) in enumerate(zip(picked.tolist(), tiles, strict=True)):
        left = _GAP + index % columns * (width + _GAP)
        top = _BAR + index // columns * (height + _BAR)
        draw.text((left, top + 4), f"latent frame {frame}", fill=_INK, font=_font(12))
        sheet.paste(image_module.fromarray(tile), (left, top + _BAR))
    return sheet


def _labelled_frames(colours: torch.Tensor, label: str) -> torch.Tensor:
    """(frames, height, width, 3) uint8 for a video: the label in a bar above each frame."""
    image_module = require("PIL.Image", "drawing previews", "pillow")
    draw_module = require("PIL.ImageDraw", "drawing previews", "pillow")
    frames = enlarge(colours, _WIDTH)
    bar = image_module.new("RGB", (frames.shape[2], _BAR), _BACKGROUND)
    size = 15
    while size > 6 and _font(size).getlength(label) > bar.width - 8:
        size -= 1
    draw_module.Draw(bar).text((4, (_BAR - size) // 2 - 2), label, fill=_INK, font=_font(size))
    header = torch.from_numpy(np.array(bar))
    return torch.cat([header.expand(frames.shape[0], -1, -1, -1), frames], dim=1)


def _audio_plot(
    audio_latent: torch.Tensor, waveform: torch.Tensor | None, sample_rate: int, label: str
) -> bytes:
    """A heat map of the audio latent, its level below, and the waveform if there is one."""
    figure_module = require("matplotlib.figure", "drawing previews")
    latent = audio_latent.detach().cpu().float()
    seconds = latent.shape[0] / _AUDIO_LATENTS_PER_SECOND
    # A figure of its own, not pyplot's: no global state, no window, any thread.
    figure = figure_module.Figure(figsize=(10, 5 if waveform is None else 7), layout="constrained")
    axes = figure.subplots(2 if waveform is None else 3, 1, sharex=True)
    figure.suptitle(label)
    limit = max(float(latent.abs().max()), 1e-6)
    image = axes[0].imshow(
        latent.T.numpy(),
        aspect="auto",
        origin="lower",
        interpolation="nearest",
        extent=(0.0, seconds, -0.5, latent.shape[1] - 0.5),
        cmap="RdBu",
        vmin=-limit,
        vmax=limit,
    )
    figure.colorbar(image, ax=axes[0], pad=0.01)
    axes[0].set(ylabel="channel", title="audio latent (not a spectrogram)")
    times = (np.arange(latent.shape[0]) + 0.5) / _AUDIO_LATENTS_PER_SECOND
    axes[1].plot(times, latent.square().mean(dim=1).sqrt().numpy())
    axes[1].set(ylabel="RMS over channels", title="level of the audio latent (not loudness)")
    if waveform is not None:
        _draw_waveform(axes[2], waveform, sample_rate)
    axes[-1].set(xlabel="seconds", xlim=(0.0, seconds))
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    return buffer.getvalue()


def _draw_waveform(axes: Any, waveform: torch.Tensor, sample_rate: int) -> None:
    samples = waveform.detach().cpu().numpy()
    times = np.arange(samples.shape[1]) / sample_rate
    for channel, name in zip(samples, ("left", "right"), strict=False):
        axes.plot(times, channel, linewidth=0.4, alpha=0.7, label=name)
    axes.set(ylabel="amplitude", title="decoded sound (this panel shows the result itself)")
    axes.legend(loc="upper right")


def _font(size: int) -> Any:
    return require("PIL.ImageFont", "drawing previews", "pillow").load_default(size)


def _png(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()
