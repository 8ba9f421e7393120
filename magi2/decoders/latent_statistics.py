"""Mean and deviation of each latent channel: the transformer works on normalised latents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from magi2.checks import describe


@dataclass(frozen=True, kw_only=True)
class LatentStatistics:
    """Of the latents that a VAE makes, before they are normalised.

    Args:
        mean: One number for each channel.
        std: One positive number for each channel.

    Raises:
        ValueError: If their counts differ or a deviation is not positive.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std) or not self.mean:
            raise ValueError(
                f"{len(self.mean)} means and {len(self.std)} deviations: expected one of each for "
                "every latent channel."
            )
        if min(self.std) <= 0:
            raise ValueError(f"std holds {min(self.std)}: expected positive numbers.")

    @classmethod
    def from_config(cls, config: Any) -> LatentStatistics:
        """Of a diffusers VAE, from its `latents_mean` and `latents_std`.

        Raises:
            ValueError: If the config lacks them or they do not fit together.
        """
        mean, std = getattr(config, "latents_mean", None), getattr(config, "latents_std", None)
        if not mean or not std:
            raise ValueError(
                "The VAE's config has no latents_mean and latents_std: expected those of "
                "Wan2.2-TI2V-5B, 48 numbers each."
            )
        return cls(mean=tuple(map(float, mean)), std=tuple(map(float, std)))

    def normalise(self, latent: torch.Tensor) -> torch.Tensor:
        """(latent - mean) * (1 / std) in float32; (channels, ...) in and out."""
        mean, inverse = self._columns(latent)
        return (latent.float() - mean) * inverse

    def denormalise(self, latent: torch.Tensor) -> torch.Tensor:
        """Latent / (1 / std) + mean in float32; (channels, ...) in and out.

        Divides by the rounded inverse, as the reference does: multiplying by std rounds otherwise.
        """
        mean, inverse = self._columns(latent)
        return latent.float() / inverse + mean

    def _columns(self, latent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        channels = len(self.mean)
        if latent.dim() < 1 or latent.shape[0] != channels:
            raise ValueError(
                f"The latent is {describe(latent)}: expected {channels} channels first, as many as "
                "there are means and deviations."
            )
        shape = (channels,) + (1,) * (latent.dim() - 1)
        mean = torch.tensor(self.mean, dtype=torch.float32, device=latent.device).view(shape)
        std = torch.tensor(self.std, dtype=torch.float32, device=latent.device).view(shape)
        return mean, 1.0 / std


# Of the Wan2.2-TI2V-5B VAE. Checked number by number against `WanVideoVAE38` of the package
# diffsynth 2.1.12 on PyPI (Apache-2.0).
# fmt: off
WAN22_STATISTICS = LatentStatistics(
    mean=(
        -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557,
        -0.1382, 0.0542, 0.2813, 0.0891, 0.1570, -0.0098, 0.0375, -0.1825,
        -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
        -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230,
        -0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520, 0.3748,
        0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
    ),
    std=(
        0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013,
        0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165, 0.8454, 0.4978,
        0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
        0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093,
        0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887,
        0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
    ),
)
# fmt: on
