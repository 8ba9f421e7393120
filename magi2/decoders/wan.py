"""The Wan2.2 VAE, through diffusers: encodes reference images, and decodes video slowly.

Its decoder is the full one of the latent space, not the distilled one that the release uses: close
to what `decode_turbo` shows, never equal to it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch

from magi2.checks import describe
from magi2.decoders.diffusers_folder import load_diffusers_folder
from magi2.decoders.frames import to_bytes
from magi2.decoders.latent_statistics import WAN22_STATISTICS, LatentStatistics
from magi2.decoders.state import load_strictly, read_weights
from magi2.decoders.wan_names import diffusers_names
from magi2.extras import require

# Of Wan2.2-TI2V-5B, as arguments of diffusers' class.
WAN22_VAE_CONFIG: dict[str, Any] = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "attn_scales": [],
    "temperal_downsample": [False, True, True],
    "dropout": 0.0,
    "latents_mean": list(WAN22_STATISTICS.mean),
    "latents_std": list(WAN22_STATISTICS.std),
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_temporal": 4,
    "scale_factor_spatial": 16,
}
_CLASS = "AutoencoderKLWan"


class VideoVae(Protocol):
    """What this package asks of a video VAE; diffusers' `AutoencoderKLWan` has it."""

    config: Any

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""

    def encode(self, x: torch.Tensor) -> Any:
        """(batch, 3, frames, height, width) to an object with `latent_dist`."""

    def decode(self, z: torch.Tensor) -> Any:
        """(batch, channels, frames, rows, columns) to an object with `sample`."""


def load_video_vae(
    path: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    config: dict[str, Any] | None = None,
) -> VideoVae:
    """Load the Wan2.2 VAE.

    Args:
        path: A diffusers folder with `config.json`, or one with such a folder `vae` in it; or the
            original single file (`Wan2.2_VAE.pth`), whose names are converted.
        device: Where it goes.
        dtype: float32 as the reference encodes images.
        config: Sizes for a single file, as arguments of `AutoencoderKLWan`; None for Wan2.2's.

    Returns:
        diffusers' `AutoencoderKLWan`, in evaluation mode and without gradients.

    Raises:
        ValueError: If files are missing or damaged, or weights are missing, unexpected or of
            another shape.
        ModuleNotFoundError: If diffusers is not installed.
    """
    path = Path(path)
    vae_class = getattr(require("diffusers", "the Wan2.2 VAE"), _CLASS)
    if path.is_dir():
        vae = load_diffusers_folder(vae_class, path, "vae", dtype)
    else:
        weights = diffusers_names(read_weights(path), path)
        with torch.device("meta"):
            vae = vae_class(**(config or WAN22_VAE_CONFIG))
        load_strictly(vae, weights, path, dtype)
    LatentStatistics.from_config(vae.config)
    loaded: VideoVae = vae.to(device=device).requires_grad_(False).eval()
    return loaded


def decode_with_vae(vae: VideoVae, latent: torch.Tensor) -> torch.Tensor:
    """Decode a clip with the full decoder: much slower than the turbo decoder.

    Args:
        vae: On any device; the work is done there, in its dtype.
        latent: (channels, frames, rows, columns), normalised, as the sampler leaves it.

    Returns:
        (4 * frames - 3, height, width, 3) uint8 on the CPU.

    Raises:
        ValueError: If the latent does not have these dimensions or the VAE's channels.
    """
    if latent.dim() != 4 or not latent.numel():
        raise ValueError(
            f"latent is {describe(latent)}: expected (channels, frames, rows, columns), without "
            "a batch dimension."
        )
    statistics = LatentStatistics.from_config(vae.config)
    raw = statistics.denormalise(latent.to(vae.device)).to(vae.dtype)
    with torch.no_grad():
        return to_bytes(vae.decode(raw[None]).sample[0])
