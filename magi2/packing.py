"""Latents, text and reference images of both branches of guidance as one packed sequence.

Each branch is one sequence; only the text differs (and, on request, what the image shows):

    sequence = [ video | audio | text | (special token k, image k) ... ]

The conditional sequence comes first. What depends on sizes alone is planned once for a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from magi2.checks import describe, whole_numbers
from magi2.conditioning import Conditioning as Conditioning
from magi2.conditioning import ReferenceImage as ReferenceImage
from magi2.coords import audio_coords, image_coords, padding_coords, text_coords, video_coords
from magi2.geometry import Geometry
from magi2.modules.embeddings import time_embedding
from magi2.modules.modality import AUDIO, TEXT, VIDEO

NUM_BRANCHES = 2
TIME_CHANNELS = 64
# Rows of the table of time columns.
_GENERATED, _GIVEN, _PADDING = range(3)


@dataclass(frozen=True, kw_only=True)
class TokenLayout:
    """Which token is what in a packed request; `plan_tokens` makes it.

    Args:
        geometry: The clip.
        text_lengths: Text tokens of the conditional and of the unconditional branch.
        image_size: Rows and columns of latents of every reference image; None without.
        num_images: Reference images.
        starts: First token of each branch.
        coords: (tokens, 9) float32.
        modality: (tokens,) int32.
        cu_seqlens: Ends of the packed sequences, from 0; padding is a sequence of its own.
        time_rows: (tokens,) int64, how a token takes part in diffusion time.
        num_padding: Tokens of padding.
    """

    geometry: Geometry
    text_lengths: tuple[int, int]
    image_size: tuple[int, int] | None
    num_images: int
    starts: tuple[int, ...]
    coords: torch.Tensor
    modality: torch.Tensor
    cu_seqlens: tuple[int, ...]
    time_rows: torch.Tensor
    num_padding: int

    @property
    def num_tokens(self) -> int:
        """Tokens of both branches and of the padding."""
        return self.cu_seqlens[-1]

    @property
    def num_generated(self) -> int:
        """Video and audio tokens of one branch, at its front."""
        return self.geometry.num_video_tokens + self.geometry.audio_length


def plan_tokens(
    geometry: Geometry,
    text_lengths: Sequence[int],
    *,
    image_size: Sequence[int] | None = None,
    num_images: int = 0,
    pad_to_multiple_of: int | None = None,
    pad_each_branch: bool = False,
    device: torch.device | str = "cpu",
) -> TokenLayout:
    """Lay out the tokens of a request.

    Args:
        geometry: The clip.
        text_lengths: Text tokens of the conditional and of the unconditional branch; 0 for none.
        image_size: Rows and columns of latents of every reference image, if there are any.
        num_images: Reference images, with one special token each.
        pad_to_multiple_of: Append rows until the tokens are a multiple of this; None for no
            padding, which this package's exchanges do not need. 48 as the reference has it.
        pad_each_branch: Pad each branch for itself, as branches on ranks of their own need it,
            instead of both together.
        device: Of the layout's tensors.

    Raises:
        ValueError: If a number is none that a request can have.
    """
    lengths, size = _check_plan(text_lengths, image_size, num_images, pad_to_multiple_of)
    tokens = _Tokens()
    video, audio = video_coords(geometry), audio_coords(geometry)
    images = [image_coords(geometry, k, *size) for k in range(num_images)] if size else []
    starts = []
    for length in lengths:
        starts.append(tokens.count)
        tokens.append(video, VIDEO, _GENERATED)
        tokens.append(audio, AUDIO, _GENERATED)
        tokens.append(text_coords(length), TEXT, _GIVEN)
        for image in images:
            tokens.append(image[:1], TEXT, _GIVEN)
            tokens.append(image[1:], VIDEO, _GIVEN)
        tokens.end_sequence()
        if pad_each_branch and pad_to_multiple_of:
            # Branches on ranks of their own have equally many sequences: perhaps an empty one.
            tokens.append_padding(-tokens.count % pad_to_multiple_of)
    if pad_to_multiple_of and not pad_each_branch and tokens.count % pad_to_multiple_of:
        tokens.append_padding(-tokens.count % pad_to_multiple_of)
    return TokenLayout(
        geometry=geometry,
        text_lengths=lengths,
        image_size=size,
        num_images=num_images,
        starts=tuple(starts),
        coords=torch.cat(tokens.coords).to(device),
        modality=torch.cat(tokens.modality).to(device),
        cu_seqlens=tuple(tokens.ends),
        time_rows=torch.cat(tokens.time_rows).to(device),
        num_padding=tokens.num_padding,
    )


def pack_tokens(
    layout: TokenLayout, video: torch.Tensor, audio: torch.Tensor, conditioning: Conditioning
) -> torch.Tensor:
    """Fill a layout: every token's channels, zeros to the right of them.

    Args:
        layout: Where the tokens go.
        video: (1, video channels, frames, rows, columns) float32, the same for both branches.
        audio: (1, audio latents, audio channels) float32, the same for both branches.
        conditioning: Text and images, of any float dtype.

    Returns:
        (tokens, channels of the widest modality) float32, a new tensor on the video's device.

    Raises:
        ValueError: If a tensor does not fit the layout.
    """
    _check_conditioning(layout, conditioning, video)
    width = max(video.shape[1], audio.shape[-1], conditioning.prompt.shape[1])
    x = torch.zeros(layout.num_tokens, width, dtype=torch.float32, device=video.device)
    write_latents(layout, x, video, audio)
    texts = (conditioning.prompt, conditioning.negative)
    for branch, (start, text) in enumerate(zip(layout.starts, texts, strict=True)):
        row = start + layout.num_generated
        x[row : row + len(text), : text.shape[1]] = text
        row += len(text)
        for image in conditioning.images:
            x[row, : len(image.special_token)] = image.special_token
            rows = image.latent.flatten(1).T
            if branch == 0 or conditioning.use_images_without_prompt:
                x[row + 1 : row + 1 + len(rows), : rows.shape[1]] = rows
            row += 1 + len(rows)
    return x


def write_latents(
    layout: TokenLayout, x: torch.Tensor, video: torch.Tensor, audio: torch.Tensor
) -> None:
    """Put the latents of another step into a packed tensor, in place; nothing else changes.

    Args:
        layout: Where the tokens are.
        x: (tokens, channels) float32, as `pack_tokens` returned it for latents of these shapes.
        video: (1, video channels, frames, rows, columns) float32.
        audio: (1, audio latents, audio channels) float32.

    Raises:
        ValueError: If a latent does not fit the layout.
    """
    geometry = layout.geometry
    for name, latent, shape in (
        ("video", video, geometry.video_shape(video.shape[1] if video.dim() > 1 else 1)),
        ("audio", audio, geometry.audio_shape(audio.shape[-1] if audio.dim() else 1)),
    ):
        if latent.shape != shape or latent.dtype != torch.float32:
            raise ValueError(
                f"{name} is {describe(latent)}: expected {shape} torch.float32, which is the "
                "geometry that the request was planned for."
            )
    video_rows, audio_rows = video[0].flatten(1).T, audio[0]
    for start in layout.starts:
        middle = start + geometry.num_video_tokens
        x[start:middle, : video_rows.shape[1]] = video_rows
        x[middle : start + layout.num_generated, : audio_rows.shape[1]] = audio_rows


def time_columns(layout: TokenLayout, timestep: int, channels: int = TIME_CHANNELS) -> torch.Tensor:
    """Diffusion time of every token, as the transformer takes it.

    Generated tokens are at the timestep, given ones at time 0, padding has zeros.

    Args:
        layout: Which token is what.
        timestep: From 0 to 1000.
        channels: Columns of the result; even.

    Returns:
        (tokens, channels) float32 on the layout's device, the same bits on every device.
    """
    # On the CPU: other devices divide by a number, and take sines, in other ways.
    time = torch.from_numpy(np.array([timestep, 0], dtype=np.float32) / np.float32(1000))
    table = torch.cat([time_embedding(time, channels), torch.zeros(1, channels)])
    return table.to(layout.time_rows.device).index_select(0, layout.time_rows)


def unpack_tokens(
    layout: TokenLayout, rows: torch.Tensor, video_channels: int, audio_channels: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Take what the model says of the latents out of its packed result.

    Args:
        layout: Where the tokens are.
        rows: (tokens, channels), enough channels for both.
        video_channels: Of a video latent.
        audio_channels: Of an audio latent.

    Returns:
        Video (branches, video channels, frames, rows, columns) and audio (branches, audio latents,
        audio channels), new tensors; the conditional branch first.

    Raises:
        ValueError: If rows does not fit the layout.
    """
    channels = max(video_channels, audio_channels)
    if rows.dim() != 2 or rows.shape[0] != layout.num_tokens or rows.shape[1] < channels:
        raise ValueError(
            f"rows is {describe(rows)}: expected ({layout.num_tokens}, channels) with at least "
            f"{channels} channels, a row for each token of the layout."
        )
    shape = layout.geometry.video_shape(video_channels)[1:]
    video, audio = [], []
    for start in layout.starts:
        middle = start + layout.geometry.num_video_tokens
        video.append(rows[start:middle, :video_channels].T.reshape(shape))
        audio.append(rows[middle : start + layout.num_generated, :audio_channels])
    return torch.stack(video), torch.stack(audio)


class _Tokens:
    """Runs of tokens, one after another, and where sequences end."""

    def __init__(self) -> None:
        self.coords: list[torch.Tensor] = []
        self.modality: list[torch.Tensor] = []
        self.time_rows: list[torch.Tensor] = []
        self.ends = [0]
        self.count = 0
        self.num_padding = 0

    def append(self, coords: torch.Tensor, kind: int, time_row: int) -> None:
        self.coords.append(coords)
        self.modality.append(torch.full((len(coords),), kind, dtype=torch.int32))
        self.time_rows.append(torch.full((len(coords),), time_row))
        self.count += len(coords)

    def end_sequence(self) -> None:
        self.ends.append(self.count)

    def append_padding(self, length: int) -> None:
        self.append(padding_coords(length), TEXT, _PADDING)
        self.end_sequence()
        self.num_padding += length


def _check_plan(
    text_lengths: Sequence[int],
    image_size: Sequence[int] | None,
    num_images: int,
    multiple: int | None,
) -> tuple[tuple[int, int], tuple[int, int] | None]:
    lengths = whole_numbers("text_lengths", text_lengths)
    if len(lengths) != NUM_BRANCHES or min(lengths) < 0:
        raise ValueError(
            f"text_lengths={list(lengths)}: expected the text tokens of the conditional and of the "
            "unconditional branch, zero or more each."
        )
    size = None if image_size is None else whole_numbers("image_size", image_size)
    if num_images < 0 or (num_images > 0) != (size is not None):
        raise ValueError(
            f"num_images={num_images} and image_size={image_size}: expected a size if there are "
            "images, and none if there are none."
        )
    if size is not None and (len(size) != 2 or min(size) < 1):
        raise ValueError(f"image_size={list(size)}: expected rows and columns of latents.")
    if multiple is not None and multiple < 1:
        raise ValueError(
            f"pad_to_multiple_of={multiple}: expected a positive integer, or None for no padding."
        )
    return (lengths[0], lengths[1]), None if size is None else (size[0], size[1])


def _check_conditioning(
    layout: TokenLayout, conditioning: Conditioning, video: torch.Tensor
) -> None:
    for name in ("text_lengths", "image_size"):
        given, planned = getattr(conditioning, name), getattr(layout, name)
        if given != planned:
            raise ValueError(
                f"the conditioning has {name}={given}: expected {planned}, which is what the "
                "layout was planned for."
            )
    if len(conditioning.images) != layout.num_images:
        raise ValueError(
            f"the conditioning has {len(conditioning.images)} images: expected "
            f"{layout.num_images}, which is what the layout was planned for."
        )
    for image in conditioning.images[:1]:
        if video.dim() > 1 and image.latent.shape[0] != video.shape[1]:
            raise ValueError(
                f"the images have {image.latent.shape[0]} latent channels and the video "
                f"{video.shape[1]}: expected the same."
            )
