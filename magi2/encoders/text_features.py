"""What a text encoder makes of a prompt."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from magi2.checks import describe


@dataclass(frozen=True, kw_only=True)
class TextFeatures:
    """Features of one prompt.

    Args:
        features: (tokens, channels), one row for each token; bfloat16 as the released encoder
            makes them.
        special_tokens: For each reference image (channels,): the mean feature of the tokens that
            name its figure, or zeros.

    Raises:
        ValueError: If the shapes or dtypes contradict each other, or a value is not finite.
    """

    features: torch.Tensor
    special_tokens: tuple[torch.Tensor, ...] = ()

    def __post_init__(self) -> None:
        features = self.features
        if features.dim() != 2 or not features.is_floating_point() or not features.shape[1]:
            raise ValueError(
                f"features is {describe(features)}: expected (tokens, channels) of a floating type."
            )
        for index, token in enumerate(self.special_tokens):
            if token.shape != features.shape[1:] or token.dtype != features.dtype:
                raise ValueError(
                    f"special_tokens[{index}] is {describe(token)}: expected "
                    f"{tuple(features.shape[1:])} {features.dtype}, as the features have."
                )
        if not all(bool(x.isfinite().all()) for x in (features, *self.special_tokens)):
            raise ValueError("The text features hold NaN or infinity: encode the prompt again.")

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.features.shape[0]

    @property
    def num_channels(self) -> int:
        """Channels of a token."""
        return self.features.shape[1]
