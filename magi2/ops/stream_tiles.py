"""How the hyper-connections' kernels, written for four streams, are cut and launched."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from magi2.ops.launch import interprets

STREAMS = 4
LOGITS = 2 * STREAMS + STREAMS**2
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, kw_only=True)
class MixTile:
    """How mixing and hyper-connecting are cut into programs; no bit depends on it.

    Attributes:
        tokens: Of a program, one after the other.
        channels: Of a program, a power of two.
        num_warps: Warps of a program.
    """

    tokens: int = 1
    channels: int = 1024
    num_warps: int = 4


@dataclass(frozen=True, kw_only=True)
class LogitsTile:
    """How the projection is cut into programs; sums of other parts are rounded otherwise.

    Attributes:
        tokens: Of a program, a power of two from 16 on.
        depth: Channels of one product, a power of two from 16 on.
        parts: Programs that share the channels of a token.
        num_warps: Warps of a program.
        num_stages: Steps whose loads are in flight.
    """

    tokens: int = 128
    depth: int = 64
    parts: int = 8
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True, kw_only=True)
class MapsTile:
    """How the maps are cut into programs, and how they divide; no bit depends on it.

    Attributes:
        tokens: Of a program, a power of two; a thread owns tokens / (32 * num_warps) of them.
        num_warps: Warps of a program.
        fast: Whether divisions share reciprocals, see `magi2.kernels.stream_maps`. Under the
            interpreter, which rounds fused multiply-adds twice, they never do.
    """

    tokens: int = 32
    num_warps: int = 1
    fast: bool = True


@dataclass(frozen=True, kw_only=True)
class LogitParts:
    """Logits that miss the norm's scale, in parts that are still to be added.

    Attributes:
        parts: (parts, N + 1, T) float32; the last row holds sums of squares.
        width: Numbers in such a sum.
        eps: Added to the mean square.
    """

    parts: torch.Tensor
    width: int
    eps: float


def launch_settings(tensor: torch.Tensor, num_warps: int) -> dict[str, Any]:
    """Every launch keeps products and sums apart: the bits of eager torch depend on it."""
    return {
        "INTERPRETED": interprets(tensor),
        "num_warps": num_warps,
        "enable_fp_fusion": False,
    }
