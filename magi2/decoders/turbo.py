"""The turbo decoder: a distilled decoder of the Wan2.2 latent space.

Parameters carry the checkpoint's names. Tensors are (batch, channels, frames, height, width).
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from magi2.checks import describe
from magi2.decoders.frames import to_bytes
from magi2.decoders.latent_statistics import WAN22_STATISTICS, LatentStatistics
from magi2.decoders.state import load_strictly, read_weights
from magi2.decoders.turbo_blocks import Conv3d, ResBlock, UpBlock, rms_norm, unpatchify
from magi2.decoders.turbo_config import TurboConfig
from magi2.decoders.windows import decode_windows

__all__ = ["TurboConfig", "TurboDecoder", "decode_turbo", "load_turbo_decoder"]

_RGB = 3
_PREFIX = "decoder."
_STATES = ("ema_state_dict", "state_dict")


class MidBlock(nn.Module):
    """The residual blocks before the first upsampling."""

    def __init__(self, channels: int, num_layers: int) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(ResBlock(channels, channels) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, channels, frames, height, width), the same out."""
        for resnet in self.resnets:
            x = resnet(x)
        return x


class TurboDecoder(nn.Module):
    """Latents to pixels, one window at a time.

    Args:
        config: Its sizes.
        device: Of the parameters, which are not initialised to anything of use.
        dtype: Of the parameters and of the activations.
    """

    def __init__(
        self,
        config: TurboConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.config = config
        # The config's lists run from pixels to latent; the decoder runs the other way.
        channels, layers = config.block_channels[::-1], config.layers_per_block[::-1]
        stages = zip(
            channels,
            layers[1:],
            config.upsamples[::-1],
            config.spatial_only[::-1],
            strict=True,
        )
        with torch.device(device or "cpu"):
            self.conv_in = Conv3d(config.latent_channels, channels[0], 3)
            self.mid_block = MidBlock(channels[0], layers[0])
            self.up_blocks = nn.ModuleList()
            before = channels[0]
            for width, num_layers, upsamples, spatial_only in stages:
                self.up_blocks.append(UpBlock(before, width, num_layers, upsamples, spatial_only))
                before = width
            self.conv_out = Conv3d(before, _RGB * config.patch_size**2, 3)
        self.to(dtype)
        self.requires_grad_(False)

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters and the activations."""
        return self.conv_in.conv.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.conv_in.conv.weight.device

    def forward(self, latent: torch.Tensor, is_first: bool) -> torch.Tensor:
        """Decode one window.

        Args:
            latent: (batch, latent channels, f, rows, columns), not normalised, in the decoder's
                dtype.
            is_first: Whether the clip begins here: its first latent then gives one frame.

        Returns:
            (batch, 3, 4f or 4f - 3, height, width), in [-1, 1] but for overshoot.
        """
        x = self.mid_block(self.conv_in(latent))
        for block in self.up_blocks:
            x = block(x, is_first)
        x = self.conv_out(F.silu(rms_norm(x, 1e-8)))
        return unpatchify(x, self.config.patch_size)


def load_turbo_decoder(
    path: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    config: TurboConfig | str | Path | None = None,
) -> TurboDecoder:
    """Load a turbo decoder.

    Args:
        path: Checkpoint: a `torch.save` dict with `ema_state_dict` or `state_dict`, or a
            safetensors file; tensors under `decoder.`, others are left alone.
        device: Where it goes.
        dtype: bfloat16 as released; float32 is slower and not the released arithmetic.
        config: Its sizes, or their JSON file; None for the released ones.

    Raises:
        ValueError: If a file cannot be read, or weights are missing, unexpected or of another
            shape.
    """
    path = Path(path)
    if config is None:
        config = TurboConfig.released()
    elif not isinstance(config, TurboConfig):
        config = TurboConfig.from_file(config)
    decoder = TurboDecoder(config, device="meta")
    load_strictly(decoder, _decoder_weights(path), path, dtype)
    return decoder.to(device).requires_grad_(False).eval()


def decode_turbo(
    decoder: TurboDecoder,
    latent: torch.Tensor,
    statistics: LatentStatistics = WAN22_STATISTICS,
) -> torch.Tensor:
    """Decode a clip.

    Args:
        decoder: On any device; the work is done there.
        latent: (channels, frames, rows, columns), normalised, as the sampler leaves it.
        statistics: Of the latent space.

    Returns:
        (4 * frames - 3, height, width, 3) uint8 on the CPU.

    Raises:
        ValueError: If the latent does not have these dimensions or the decoder's channels.
    """
    config = decoder.config
    if latent.dim() != 4 or latent.shape[0] != config.latent_channels or not latent.numel():
        raise ValueError(
            f"latent is {describe(latent)}: expected ({config.latent_channels}, frames, rows, "
            "columns), without a batch dimension."
        )
    # Rounded before the statistics and again after: the reference's order.
    rounded = latent.to(device=decoder.device, dtype=decoder.dtype)
    raw = statistics.denormalise(rounded).to(decoder.dtype)

    def decode(window: torch.Tensor, is_first: bool) -> torch.Tensor:
        pixels: torch.Tensor = decoder(window[None], is_first)[0]
        return pixels

    with torch.no_grad():
        windows = decode_windows(decode, raw, config.first_chunk_size, config.step_size)
        # To bytes window by window: a clip of 540p in float32 would be 0.7 GB.
        return torch.cat([to_bytes(pixels) for pixels in windows])


def _decoder_weights(path: Path) -> dict[str, torch.Tensor]:
    """The tensors under `decoder.`, without the prefixes."""
    loaded = read_weights(path)
    for key in _STATES:
        if isinstance(loaded.get(key), dict):
            loaded = loaded[key]
            break
    weights = {}
    for name, tensor in loaded.items():
        bare = str(name).removeprefix("module.")
        if bare.startswith(_PREFIX) and isinstance(tensor, torch.Tensor):
            weights[bare.removeprefix(_PREFIX)] = tensor
    if not weights:
        raise ValueError(
            f"{path} holds no tensor under {_PREFIX!r}, neither in {' nor in '.join(_STATES)} nor "
            "at the top: expected the turbo decoder's checkpoint."
        )
    return weights
