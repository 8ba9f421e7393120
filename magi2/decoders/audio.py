"""Sound from audio latents: the Oobleck decoder of Stable Audio Open 1.0, through diffusers."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from magi2.checks import describe
from magi2.decoders.diffusers_folder import load_diffusers_folder
from magi2.decoders.state import load_strictly, read_weights
from magi2.extras import require

SAMPLE_RATE = 44100
# Of Stable Audio Open 1.0, as arguments of diffusers' class.
OOBLECK_CONFIG: dict[str, Any] = {
    "encoder_hidden_size": 128,
    "downsampling_ratios": [2, 4, 4, 8, 8],
    "channel_multiples": [1, 2, 4, 8, 16],
    "decoder_channels": 128,
    "decoder_input_channels": 64,
    "audio_channels": 2,
    "sampling_rate": SAMPLE_RATE,
}
# Samples out for samples in: the transformer counts 25 latents a second, 1764 samples at 44.1 kHz
# for each, and the decoder makes 2048.
_KEPT, _MADE = 441, 512
_CLASS = "AutoencoderOobleck"
_PREFIX = "pretransform.model."
# Layers outside the blocks, and inside a residual unit.
_ENDS = {"0": "conv1", "6": "snake1", "7": "conv2"}
_LAYERS = {"0": "snake1", "1": "conv1", "2": "snake2", "3": "conv2"}


class AudioDecoder(Protocol):
    """What this package asks of an audio VAE; diffusers' `AutoencoderOobleck` has it."""

    config: Any

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""

    def decode(self, z: torch.Tensor) -> Any:
        """(batch, latent channels, frames) to an object with `sample`."""


def load_audio_decoder(
    path: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    config: dict[str, Any] | None = None,
) -> AudioDecoder:
    """Load the decoder of an Oobleck VAE.

    Args:
        path: A diffusers folder with `config.json`, or one with such a folder `vae` in it; or a
            checkpoint of Stable Audio, whose `pretransform.model.decoder.*` are renamed.
        device: Where it goes.
        dtype: float32 as the reference decodes.
        config: Sizes for a checkpoint, as arguments of `AutoencoderOobleck`; None for those of
            Stable Audio Open 1.0.

    Returns:
        diffusers' `AutoencoderOobleck` without its encoder, in evaluation mode and without
        gradients.

    Raises:
        ValueError: If files are missing or damaged, or weights are missing, unexpected or of
            another shape.
        ModuleNotFoundError: If diffusers is not installed.
    """
    path = Path(path)
    vae_class = getattr(require("diffusers", "decoding sound"), _CLASS)
    with warnings.catch_warnings():
        # diffusers still builds on torch's old weight norm, which is what the files hold.
        warnings.filterwarnings("ignore", message=".*weight_norm", category=FutureWarning)
        if path.is_dir():
            vae = load_diffusers_folder(vae_class, path, "vae", dtype)
        else:
            weights = oobleck_weights(read_weights(path), path)
            with torch.device("meta"):
                vae = vae_class(**(config or OOBLECK_CONFIG))
    # Nothing here encodes sound, and of a checkpoint no encoder was read.
    del vae.encoder
    if not path.is_dir():
        load_strictly(vae, weights, path, dtype)
    loaded: AudioDecoder = vae.to(device=device).requires_grad_(False).eval()
    return loaded


def decode_audio(decoder: AudioDecoder, latent: torch.Tensor) -> torch.Tensor:
    """Decode sound and bring it to 44.1 kHz.

    Args:
        decoder: On any device; the work is done there, in its dtype.
        latent: (frames, channels), 25 frames a second, as the sampler leaves it.

    Returns:
        (sound channels, samples) float32 on the CPU, 1764 samples for each frame of the released
        decoder.

    Raises:
        ValueError: If the latent does not have these dimensions or the decoder's channels.
        ModuleNotFoundError: If scipy is not installed.
    """
    channels = decoder.config.decoder_input_channels
    if latent.dim() != 2 or latent.shape[1] != channels or not latent.numel():
        raise ValueError(
            f"latent is {describe(latent)}: expected (frames, {channels}), without a batch "
            "dimension."
        )
    z = latent.to(device=decoder.device, dtype=decoder.dtype).T.contiguous()
    with torch.no_grad():
        samples = decoder.decode(z[None]).sample[0].float().cpu().numpy()
    # Resampling the whole clip by its Fourier transform is the reference's way.
    signal = require("scipy.signal", "resampling sound")
    resampled = signal.resample(samples, samples.shape[1] * _KEPT // _MADE, axis=1)
    return torch.from_numpy(np.ascontiguousarray(resampled, dtype=np.float32))


def oobleck_weights(weights: Mapping[str, Any], source: Path) -> dict[str, torch.Tensor]:
    """Rename a Stable Audio checkpoint's decoder to diffusers' names; other weights are left out.

    Raises:
        ValueError: If it holds no such decoder.
    """
    if isinstance(weights.get("state_dict"), dict):
        weights = weights["state_dict"]
    renamed = {}
    for name, tensor in weights.items():
        bare = str(name).removeprefix(_PREFIX)
        if bare.startswith("decoder.") and isinstance(tensor, torch.Tensor):
            new = oobleck_name(bare)
            # Snake's parameters: a vector there, (1, channels, 1) here.
            is_snake = new.endswith((".alpha", ".beta")) and tensor.dim() == 1
            renamed[new] = tensor[None, :, None] if is_snake else tensor
    if not renamed:
        raise ValueError(
            f"{source} holds no weight under {_PREFIX + 'decoder.'!r}: expected a checkpoint of "
            "Stable Audio Open 1.0."
        )
    return renamed


def oobleck_name(name: str) -> str:
    """What diffusers calls a decoder weight of Stable Audio; others come back unchanged."""
    if match := re.fullmatch(r"decoder\.layers\.([067])\.(.+)", name):
        number, leaf = match.groups()
        return f"decoder.{_ENDS[number]}.{leaf}"
    if match := re.fullmatch(r"decoder\.layers\.([1-5])\.layers\.([01])\.(\w+)", name):
        block, number, leaf = match.groups()
        layer = "conv_t1" if number == "1" else "snake1"
        return f"decoder.block.{int(block) - 1}.{layer}.{leaf}"
    pattern = r"decoder\.layers\.([1-5])\.layers\.([234])\.layers\.([0-3])\.(\w+)"
    if match := re.fullmatch(pattern, name):
        block, unit, number, leaf = match.groups()
        return f"decoder.block.{int(block) - 1}.res_unit{int(unit) - 1}.{_LAYERS[number]}.{leaf}"
    return name
