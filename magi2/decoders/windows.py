"""Decoding a clip in overlapping windows, as the turbo decoder was trained to.

A decoder turns f latent frames into 4f frames, or 4f - 3 for the first window of a clip. Windows
share their outermost latent frame with their neighbours, and the frames made of it are thrown away,
since they lack half of their context. With windows of 7, and 32 latent frames:

    padded to 35 by repeating the last; windows [0, 8) [6, 15) [13, 22) [20, 29) [27, 35)
    frames made   29, 36, 36, 36, 32
    frames kept   25, 28, 28, 28, 28 = 137, less 12 for the padding = 125
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from magi2.checks import describe

# Frames for each latent frame.
SCALE = 4


@dataclass(frozen=True, kw_only=True)
class Window:
    """One call of the decoder.

    Args:
        start: First latent frame, of the padded clip.
        stop: Latent frame after the last.
        is_first: Whether the first latent frame gives one frame in place of four.
        drop_front: Frames to throw away at the start of the result.
        drop_back: Frames to throw away at its end.
    """

    start: int
    stop: int
    is_first: bool
    drop_front: int
    drop_back: int


@dataclass(frozen=True, kw_only=True)
class WindowPlan:
    """How a clip is decoded.

    Args:
        padding: Latent frames to append, copies of the last.
        windows: In order.
    """

    padding: int
    windows: tuple[Window, ...]


def plan_windows(num_latents: int, first_chunk: int = 7, step: int = 7) -> WindowPlan:
    """Windows for a clip.

    Args:
        num_latents: Latent frames of the clip.
        first_chunk: Latent frames whose output the first window gives.
        step: The same for each further window.

    Raises:
        ValueError: If one of them is not positive.
    """
    if min(num_latents, first_chunk, step) < 1:
        raise ValueError(
            f"num_latents={num_latents}, first_chunk={first_chunk}, step={step}: expected "
            "positive numbers."
        )
    num_further = max(0, -(-(num_latents - first_chunk) // step))
    total = first_chunk + num_further * step
    padding = total - num_latents
    if not num_further:
        only = Window(start=0, stop=total, is_first=True, drop_front=0, drop_back=SCALE * padding)
        return WindowPlan(padding=padding, windows=(only,))
    windows = [Window(start=0, stop=first_chunk + 1, is_first=True, drop_front=0, drop_back=SCALE)]
    for start in range(first_chunk, total, step):
        is_last = start + step == total
        windows.append(
            Window(
                start=start - 1,
                stop=start + step + (not is_last),
                is_first=False,
                drop_front=SCALE,
                drop_back=SCALE * padding if is_last else SCALE,
            )
        )
    return WindowPlan(padding=padding, windows=tuple(windows))


def decode_windows(
    decode: Callable[[torch.Tensor, bool], torch.Tensor],
    latent: torch.Tensor,
    first_chunk: int = 7,
    step: int = 7,
) -> Iterator[torch.Tensor]:
    """Run a decoder over a clip, window by window.

    Args:
        decode: (channels, f, rows, columns) and whether it is the first window, to
            (3, 4f or 4f - 3, height, width).
        latent: (channels, frames, rows, columns).
        first_chunk: As in `plan_windows`.
        step: As in `plan_windows`.

    Yields:
        (3, n, height, width): the frames that are kept, in order; 4 * frames - 3 in all.

    Raises:
        ValueError: If latent has not four dimensions, or as `plan_windows`.
    """
    if latent.dim() != 4:
        raise ValueError(
            f"latent is {describe(latent)}: expected (channels, frames, rows, columns)."
        )
    plan = plan_windows(latent.shape[1], first_chunk, step)
    last = latent[:, -1:].expand(-1, plan.padding, -1, -1)
    padded = torch.cat([latent, last], dim=1)
    for window in plan.windows:
        frames = decode(padded[:, window.start : window.stop], window.is_first)
        yield frames[:, window.drop_front : frames.shape[1] - window.drop_back]
