"""Which part of each tensor a rank reads.

Only the routed experts are sharded: their tensors have one row block for each head of the mixture,
and a rank holds the blocks of its own heads. Everything else is whole on every rank.
"""

from __future__ import annotations

_SHARDED = ".moe_mlp."


def is_sharded(name: str) -> bool:
    """Whether the tensor of this name is divided by heads of the mixture."""
    return _SHARDED in name


def rows_to_read(name: str, heads: range, num_experts: int) -> range | None:
    """Rows of dimension 0 that a rank with these heads holds; None for all."""
    if not is_sharded(name):
        return None
    return range(heads.start * num_experts, heads.stop * num_experts)


def full_shape(
    name: str, local_shape: tuple[int, ...], num_heads: int, num_experts: int
) -> tuple[int, ...]:
    """Shape in the checkpoint of a tensor that has local_shape on this rank."""
    if not is_sharded(name):
        return local_shape
    return (num_heads * num_experts, *local_shape[1:])
