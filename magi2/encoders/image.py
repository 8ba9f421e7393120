"""Reference images: pixels as the VAE takes them, and latents as the transformer takes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from magi2.checks import describe
from magi2.decoders.latent_statistics import LatentStatistics
from magi2.decoders.wan import VideoVae
from magi2.extras import require

# Of the sides in pixels: the latent grid then has even sides.
_MULTIPLE = 32
# Modes of Pillow whose values "RGB" would clip: integers of 16 or 32 bits, and floats.
_WIDE_MODES = ("I", "F")
_WHITE = (255, 255, 255)


def load_reference_image(path: str | Path, height: int, width: int) -> torch.Tensor:
    """Read an image and bring it to the size at which it is encoded.

    Its long side becomes the longer one of the clip, both sides multiples of 32; the shape of the
    image stays, but for that rounding. Pixels are taken as they are stored: a camera's rotation
    mark is not applied, and transparency is dropped.

    Args:
        path: Any format that Pillow reads.
        height: Of the clip, in pixels.
        width: Of the clip, in pixels.

    Returns:
        (3, h, w) float32 in [-1, 1].

    Raises:
        ValueError: If the file cannot be read as an image, holds values of more than 8 bits, or is
            so narrow, or the clip so small, that a side would be under 32 pixels.
        ModuleNotFoundError: If Pillow or diffusers is not installed.
    """
    image = _open(Path(path))
    if max(height, width) < _MULTIPLE:
        raise ValueError(
            f"a clip of {width} x {height} pixels takes no reference image: expected a side of "
            f"{_MULTIPLE} pixels or more. Use a larger clip."
        )
    target_width, target_height = target_size(image.width, image.height, max(height, width))
    if min(target_width, target_height) < _MULTIPLE:
        raise ValueError(
            f"{path} is {image.width} x {image.height}: at a long side of {max(height, width)} "
            f"pixels its short side is under {_MULTIPLE}. Use an image of a less narrow shape."
        )
    canvas = _fit(image, target_width, target_height)
    video_processor = require("diffusers.video_processor", "preparing reference images")
    processor = video_processor.VideoProcessor(vae_scale_factor=_MULTIPLE)
    pixels: torch.Tensor = processor.preprocess(canvas, height=target_height, width=target_width)
    return pixels[0]


def encode_reference_image(vae: VideoVae, pixels: torch.Tensor) -> torch.Tensor:
    """Encode an image as a video of one frame.

    Args:
        vae: In float32, on any device; the work is done there.
        pixels: (3, h, w) in [-1, 1]; sides that the VAE's stride divides.

    Returns:
        (channels, 1, h / stride, w / stride) float32 on the VAE's device: the mean of the
        posterior, normalised.

    Raises:
        ValueError: If the VAE is not in float32 or the pixels are not of this shape.
    """
    if vae.dtype != torch.float32:
        raise ValueError(
            f"The VAE is in {vae.dtype}: expected float32, in which the reference encodes images. "
            "Load it with dtype=torch.float32."
        )
    stride = int(vae.config.scale_factor_spatial)
    if (
        pixels.dim() != 3
        or pixels.shape[0] != 3
        or pixels.shape[1] % stride
        or (pixels.shape[2] % stride)
    ):
        raise ValueError(
            f"pixels is {describe(pixels)}: expected (3, height, width) with sides that are "
            f"multiples of {stride}."
        )
    # Through bfloat16, as the reference does.
    rounded = pixels.to(device=vae.device, dtype=torch.bfloat16).float()
    with torch.no_grad():
        mean = vae.encode(rounded[None, :, None]).latent_dist.mode()[0]
    return LatentStatistics.from_config(vae.config).normalise(mean)


def target_size(width: int, height: int, long_side: int) -> tuple[int, int]:
    """Width and height of an image whose long side becomes `long_side`, rounded down."""
    if width > height:
        return long_side, height * long_side // width
    return width * long_side // height, long_side


def _open(path: Path) -> Any:
    image_module = require("PIL.Image", "reading images", "pillow")
    try:
        with image_module.open(path) as image:
            if image.mode.startswith(_WIDE_MODES):
                raise ValueError(
                    f"it holds values of more than 8 bits ({image.mode}), which would be cut off. "
                    "Save it with 8 bits a channel."
                )
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError, image_module.DecompressionBombError) as error:
        raise ValueError(f"{path} cannot be read as an image: {error}") from error


def _fit(image: Any, width: int, height: int) -> Any:
    """Scale an image to fit, and centre it on white."""
    image_module = require("PIL.Image", "reading images", "pillow")
    scale = min(width / image.width, height / image.height)
    inner = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    resized = image.resize(inner, image_module.Resampling.LANCZOS)
    canvas = image_module.new("RGB", (width, height), _WHITE)
    canvas.paste(resized, ((width - inner[0]) // 2, (height - inner[1]) // 2))
    return canvas
