"""What an all-to-all means, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def simulate_all_to_all(
    inputs: Sequence[torch.Tensor], counts: Sequence[Sequence[int]]
) -> list[torch.Tensor]:
    """Return what every rank receives, without ranks, groups or threads.

    Args:
        inputs: What each rank sends, in rank order; dimension 0 is split.
        counts: `counts[source][destination]` rows go from a rank to another.

    Returns:
        One new tensor per rank: what it got from rank 0, then from rank 1, and so on.

    Raises:
        ValueError: If `counts` is not square, or a row of it does not add up to the input's rows.
    """
    size = len(inputs)
    if len(counts) != size or any(len(row) != size for row in counts):
        raise ValueError(f"counts must be {size} x {size} for {size} inputs, got {counts}")
    for rank, (tensor, row) in enumerate(zip(inputs, counts, strict=True)):
        if min(row) < 0 or sum(row) != tensor.shape[0]:
            raise ValueError(
                f"rank {rank} sends {list(row)} rows, which add up to {sum(row)}, but its input "
                f"has {tensor.shape[0]}"
            )
    pieces = [tensor.split(list(row)) for tensor, row in zip(inputs, counts, strict=True)]
    return [torch.cat([piece[rank] for piece in pieces]) for rank in range(size)]
