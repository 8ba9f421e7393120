"""Attention of an unmodified transformers model, run through the exchanges.

transformers looks attention up in a registry. The function registered here trades the token axis
for the head axis, attends over the whole sequence with this rank's heads, and trades back. It gets
the group from the caller of the model: `model(..., exchange=SequenceExchange(group, ...))`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ulysses_comm import (
    as_send_buffer,
    pack_head_shards,
    scatter_heads_gather_seqlen,
    scatter_seqlen_gather_head_shards,
    scatter_seqlen_gather_heads,
)
from ulysses_comm.group import Group

ATTENTION_NAME = "ulysses_comm"

# packed: the exchanges copy, Q/K/V into the send buffer and the output out of the receive buffer.
# in-place: Q/K/V are stored as head shards, the output is read as head shards; nothing is copied.
Layout = Literal["packed", "in-place"]
LAYOUTS: tuple[Layout, ...] = ("packed", "in-place")


@dataclass(kw_only=True)
class SequenceExchange:
    """One rank's way through the exchanges, and what it saw there.

    Attributes:
        group: The ranks that share the sequence: ProcessGroup or 1-D DeviceMesh.
        rank: This rank's place in it.
        split_sizes: Tokens each rank owns, in rank order.
        layout: Who copies, see `Layout`.
        received: A digest of every exchange's result, in call order.
        send_addresses: Where the send buffer of every in-place exchange starts, in call order.
    """

    group: Group
    rank: int
    split_sizes: list[int]
    layout: Layout
    received: list[str] = field(default_factory=list)
    send_addresses: list[int] = field(default_factory=list)

    def scatter_heads(self, qkv: list[torch.Tensor]) -> list[torch.Tensor]:
        """Trade (seqlen_local, num_heads, head_dim) for (seqlen, num_heads_local, head_dim)."""
        if self.layout == "in-place":
            world_size = len(self.split_sizes)
            # In eager mode this is where Q/K/V get their send order; compiled together with the
            # projection, it is where the projection stores them.
            qkv = pack_head_shards(qkv, world_size)
            buffer = as_send_buffer(qkv, world_size)
            assert buffer is not None, "a fresh pack tiles its send buffer"
            self.send_addresses.append(buffer.data_ptr())
        results = scatter_heads_gather_seqlen(qkv, self.split_sizes, self.group)
        self.received.append(digest(torch.cat(results, dim=1)))
        return results

    def gather_heads(self, output: torch.Tensor) -> torch.Tensor:
        """Trade (seqlen, num_heads_local, head_dim) for this rank's tokens of every head.

        Returns:
            (seqlen_local, num_heads, head_dim), or in place (seqlen_local, world_size,
            num_heads_local, head_dim): the same values, seen where they were received.
        """
        if self.layout == "in-place":
            self.send_addresses.append(output.data_ptr())
            result = scatter_seqlen_gather_head_shards(output, self.split_sizes, self.group)
        else:
            result = scatter_seqlen_gather_heads(output, self.split_sizes, self.group)
        self.received.append(digest(result))
        return result


def digest(tensor: torch.Tensor) -> str:
    """Hash the bits of a tensor in index order, whatever its strides."""
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(data.cpu().numpy().data).hexdigest()


def sequence_parallel_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    exchange: SequenceExchange,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend over the whole sequence, from a rank that holds a part of it.

    Args:
        module: The attention layer that calls; unused, part of the registry's signature.
        query: (1, num_heads, rows, head_dim), as key and value; rows is `seqlen_local`, or one
            stand-in row on a rank without tokens.
        key: See query.
        value: See query.
        attention_mask: Must be None: one sequence, every token sees every token.
        exchange: This rank's exchanges.
        scaling: Factor on the scores.
        dropout: Must be zero.
        kwargs: What else the model passes along; unused.

    Returns:
        (1, rows, ...) with the heads after the tokens, flat or as head shards; and no weights.

    Raises:
        ValueError: If a mask, dropout or a batch is asked for.
    """
    if attention_mask is not None or dropout != 0.0 or query.shape[0] != 1:
        raise ValueError(
            f"Given a mask: {attention_mask is not None}, dropout={dropout}, "
            f"batch={query.shape[0]}; expected no mask, no dropout and one sequence. "
            "Call the model in evaluation mode on one text."
        )
    local_tokens = exchange.split_sizes[exchange.rank]
    local = [tensor[0].transpose(0, 1)[:local_tokens] for tensor in (query, key, value)]
    q, k, v = [tensor.transpose(0, 1)[None] for tensor in exchange.scatter_heads(local)]
    output = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scaling)
    result = exchange.gather_heads(output[0].transpose(0, 1).contiguous())
    if local_tokens == 0:
        # The stand-in row has no result of its own; whatever the model makes of it is dropped.
        result = result.new_zeros(query.shape[2], *result.shape[1:])
    return result[None], None


def register_attention() -> None:
    """Make `ATTENTION_NAME` known to transformers. Doing it again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, sequence_parallel_attention)
