"""Parts of the turbo decoder. Tensors are (batch, channels, frames, height, width)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def rms_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide by the root mean square over the channels, without a weight, in float32."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype)


def unpatchify(x: torch.Tensor, patch_size: int) -> torch.Tensor:
    """Channels to pixels: channel = (colour * patch + column) * patch + row.

    Args:
        x: (batch, colours * patch_size**2, frames, height, width).
        patch_size: Pixels along height and width.

    Returns:
        (batch, colours, frames, height * patch_size, width * patch_size).
    """
    x = x.unflatten(1, (-1, patch_size, patch_size))
    # batch, colour, column, row, frames, height, width
    x = x.permute(0, 1, 4, 5, 3, 6, 2)
    return x.flatten(5, 6).flatten(3, 4)


class Conv3d(nn.Module):
    """Convolution that keeps the size: edge frames repeated in time, zeros in space."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel: int | tuple[int, int, int]
    ) -> None:
        super().__init__()
        self.conv = nn.Conv3d(in_channels, out_channels, kernel)
        time, height, width = self.conv.kernel_size
        self._space = (width // 2, width // 2, height // 2, height // 2, 0, 0)
        self._time = (time - 1) // 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, in channels, frames, height, width) to the out channels."""
        if self._time:
            first = x[:, :, :1].expand(-1, -1, self._time, -1, -1)
            last = x[:, :, -1:].expand(-1, -1, self._time, -1, -1)
            x = torch.cat([first, x, last], dim=2)
        y: torch.Tensor = self.conv(F.pad(x, self._space))
        return y


class ResBlock(nn.Module):
    """Two convolutions beside a skip.

    Args:
        in_channels: Of the input.
        out_channels: Of the output; if they differ, the skip is normalised and projected.
        relu: Whether the first activation is ReLU in place of SiLU.
    """

    def __init__(self, in_channels: int, out_channels: int, relu: bool = False) -> None:
        super().__init__()
        self.conv1 = Conv3d(in_channels, out_channels, 3)
        self.conv2 = Conv3d(out_channels, out_channels, 3)
        self.conv_shortcut = (
            Conv3d(in_channels, out_channels, 1) if in_channels != out_channels else None
        )
        self._relu = relu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, in channels, frames, height, width) to the out channels."""
        y = rms_norm(x, 1e-8)
        y = self.conv1(F.relu(y) if self._relu else F.silu(y))
        y = self.conv2(F.silu(rms_norm(y, 1e-8)))
        if self.conv_shortcut is not None:
            x = self.conv_shortcut(rms_norm(x, 1e-6))
        total: torch.Tensor = x + y
        return total


class Upsampler(nn.Module):
    """Doubles height and width, and the number of frames unless `spatial_only`."""

    def __init__(self, channels: int, spatial_only: bool) -> None:
        super().__init__()
        self.time_conv = None if spatial_only else Conv3d(channels, 2 * channels, (3, 1, 1))
        # The checkpoint's names count the parameterless upsampling as number 0.
        self.resample = nn.Sequential(
            nn.Upsample(scale_factor=2, mode="nearest"), nn.Conv2d(channels, channels, 3, padding=1)
        )

    def forward(self, x: torch.Tensor, is_first: bool) -> torch.Tensor:
        """Upsample; in the first window of a clip the first of the doubled frames is dropped."""
        if self.time_conv is not None:
            # (2, channels) of every frame become two frames.
            x = self.time_conv(x).unflatten(1, (2, -1)).movedim(1, 3).flatten(2, 3)
            if is_first:
                x = x[:, :, 1:]
        frames = x.movedim(2, 1)
        y: torch.Tensor = self.resample(frames.flatten(0, 1))
        return torch.unflatten(y, 0, frames.shape[:2]).movedim(1, 2)


class UpBlock(nn.Module):
    """To other channels if they change, an upsampler if there is one, then residual blocks."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        num_layers: int,
        upsamples: bool,
        spatial_only: bool,
    ) -> None:
        super().__init__()
        self.conv_in = ResBlock(in_channels, out_channels) if in_channels != out_channels else None
        upsamplers = [Upsampler(out_channels, spatial_only)] if upsamples else []
        self.upsamplers = nn.ModuleList(upsamplers)
        self.resnets = nn.ModuleList(
            ResBlock(out_channels, out_channels, relu=upsamples) for _ in range(num_layers)
        )

    def forward(self, x: torch.Tensor, is_first: bool) -> torch.Tensor:
        """(batch, in channels, frames, height, width) to the out channels, upsampled."""
        if self.conv_in is not None:
            x = self.conv_in(x)
        for upsampler in self.upsamplers:
            x = upsampler(x, is_first)
        for resnet in self.resnets:
            x = resnet(x)
        return x
