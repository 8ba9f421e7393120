"""Copy head shards."""

from collections.abc import Sequence

import torch


def copy_head_shards(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its destination."""
    for destination, source in zip(destinations, sources, strict=True):
        destination.copy_(source)
