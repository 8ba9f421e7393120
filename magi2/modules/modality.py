"""Tokens grouped by modality, and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from magi2.checks import describe, whole_numbers
from magi2.config import NUM_MODALITIES
from magi2.ops.token_permute import inverse_permutation

VIDEO, AUDIO, TEXT, TIME = range(4)


@dataclass(frozen=True, kw_only=True)
class ModalityOrder:
    """The order that has all video tokens first, then audio, then text.

    Args:
        permutation: (tokens,) int64, `x[permutation]` is in modality order; stable inside a group.
        inverse: (tokens,) int64, back to packed order.
        group_sizes: Tokens of each modality.

    Raises:
        ValueError: If permutation and inverse are not that, or the sizes do not add up to them.
            One look at the device, once a request.
    """

    permutation: torch.Tensor
    inverse: torch.Tensor
    group_sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        sizes = whole_numbers("group_sizes", self.group_sizes)
        if len(sizes) != NUM_MODALITIES or any(size < 0 for size in sizes):
            raise ValueError(
                f"group_sizes={list(sizes)}: expected {NUM_MODALITIES} of zero or more, the tokens "
                "of video, audio and text."
            )
        for name in ("permutation", "inverse"):
            mapping = getattr(self, name)
            if mapping.dtype != torch.int64 or mapping.shape != (sum(sizes),):
                raise ValueError(
                    f"{name} is {describe(mapping)}: expected ({sum(sizes)},) torch.int64, one row "
                    f"number for each token of group_sizes={list(sizes)}."
                )
        # Sorted rather than used as indices: on a GPU a wrong index would end the process.
        numbers, back = self.permutation.sort()
        rows = torch.arange(sum(sizes), device=numbers.device)
        if not bool(((numbers == rows) & (back == self.inverse)).all()):
            raise ValueError(
                "permutation and inverse are not a permutation of the tokens and its inverse: "
                "expected each row number once, and x[permutation][inverse] to be x."
            )

    @classmethod
    def from_modality(cls, modality: torch.Tensor) -> ModalityOrder:
        """Group tokens by their ids: 0 video, 1 audio, 2 text, 3 time, which counts as text.

        Args:
            modality: (tokens,) integers.

        Raises:
            ValueError: If it is not one-dimensional and integer, or holds another id.
        """
        check_modality(modality)
        modality = modality.clamp(max=TEXT)
        permutation = torch.argsort(modality, stable=True)
        sizes = torch.bincount(modality, minlength=NUM_MODALITIES).tolist()
        return cls(
            permutation=permutation,
            inverse=inverse_permutation(permutation),
            group_sizes=tuple(sizes),
        )

    def group(self, x: torch.Tensor) -> torch.Tensor:
        """Rows from packed order into modality order."""
        return x.index_select(0, self.permutation)

    def ungroup(self, x: torch.Tensor) -> torch.Tensor:
        """Rows from modality order into packed order."""
        return x.index_select(0, self.inverse)

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The rows of each modality of a tensor in modality order."""
        return torch.split(x, list(self.group_sizes))


def check_modality(modality: torch.Tensor) -> None:
    """Refuse a modality map that is not a vector of ids 0 to 3.

    Raises:
        ValueError: As said.
    """
    is_vector = isinstance(modality, torch.Tensor) and modality.dim() == 1
    if not is_vector or modality.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"modality is {describe(modality)}: expected one int32 or int64 id for each token."
        )
    wrong = (modality < VIDEO) | (modality > TIME)
    if bool(wrong.any()):
        token = int(wrong.nonzero()[0])
        raise ValueError(
            f"modality holds {int(modality[token])} at token {token}: expected 0 (video), 1 "
            "(audio), 2 (text) or 3 (time)."
        )
