"""What a clip is to show: encoded text and reference images."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from magi2.checks import describe


@dataclass(frozen=True, kw_only=True)
class ReferenceImage:
    """One image that the clip refers to.

    Args:
        latent: (video channels, 1, height, width) float32, normalised as the clip's latents are.
        special_token: (text channels,), what the prompt says of the image; zeros if nothing.

    Raises:
        ValueError: If a tensor has another shape or dtype.
    """

    latent: torch.Tensor
    special_token: torch.Tensor

    def __post_init__(self) -> None:
        is_image = isinstance(self.latent, torch.Tensor) and self.latent.dim() == 4
        if not is_image or self.latent.shape[1] != 1 or self.latent.dtype != torch.float32:
            raise ValueError(
                f"the image latent is {describe(self.latent)}: expected (channels, 1, height, "
                "width) float32."
            )
        token = self.special_token
        if not isinstance(token, torch.Tensor) or token.dim() != 1 or not token.is_floating_point():
            raise ValueError(
                f"the image's special token is {describe(token)}: expected (text channels,) of "
                "floating point."
            )

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns of latents."""
        return self.latent.shape[2], self.latent.shape[3]


@dataclass(frozen=True, kw_only=True)
class Conditioning:
    """What a clip is to show, for both branches of guidance.

    Args:
        prompt: (tokens, text channels) features of the prompt.
        negative: The same of the negative prompt, with a length of its own; no rows for none.
        images: Reference images, all of one latent size.
        use_images_without_prompt: Whether the unconditional branch sees the images too. If not,
            it has their tokens with zeros for their latents.

    Raises:
        ValueError: If these have other shapes or dtypes, or contradict each other.
    """

    prompt: torch.Tensor
    negative: torch.Tensor
    images: tuple[ReferenceImage, ...] = ()
    use_images_without_prompt: bool = True

    def __post_init__(self) -> None:
        for name in ("prompt", "negative"):
            text = getattr(self, name)
            is_matrix = isinstance(text, torch.Tensor) and text.dim() == 2
            if not is_matrix or not text.is_floating_point():
                raise ValueError(
                    f"{name} is {describe(text)}: expected (tokens, text channels) of floating "
                    "point; (0, text channels) for no text."
                )
        if self.prompt.shape[1] != self.negative.shape[1]:
            raise ValueError(
                f"prompt has {self.prompt.shape[1]} channels and negative "
                f"{self.negative.shape[1]}: expected features of the same encoder."
            )
        shapes = {(tuple(image.latent.shape), len(image.special_token)) for image in self.images}
        if len(shapes) > 1:
            raise ValueError(
                f"the images have latents and special tokens of {sorted(shapes)}: expected one "
                "size for all. Bring the images to one size before encoding them."
            )
        if self.images and len(self.images[0].special_token) != self.prompt.shape[1]:
            raise ValueError(
                f"the images' special tokens have {len(self.images[0].special_token)} channels and "
                f"the prompt {self.prompt.shape[1]}: expected the same, both are text features."
            )

    @property
    def text_lengths(self) -> tuple[int, int]:
        """Text tokens of each branch."""
        return self.prompt.shape[0], self.negative.shape[0]

    @property
    def image_size(self) -> tuple[int, int] | None:
        """Rows and columns of latents of every image; None without images."""
        return self.images[0].size if self.images else None

    def to(self, device: torch.device | str) -> Conditioning:
        """The same with all tensors on a device."""
        images = tuple(
            replace(
                image,
                latent=image.latent.to(device),
                special_token=image.special_token.to(device),
            )
            for image in self.images
        )
        return replace(
            self, prompt=self.prompt.to(device), negative=self.negative.to(device), images=images
        )
