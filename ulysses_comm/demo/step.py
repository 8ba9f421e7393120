"""What one rank does: embed, run every layer on its own tokens, pool over all ranks."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ulysses_comm.demo.attention import Layout, SequenceExchange
from ulysses_comm.demo.encoder import sentence_embedding
from ulysses_comm.group import Group, resolve_group


@dataclass(frozen=True, kw_only=True)
class RankOutcome:
    """What one rank brings back from one run.

    Attributes:
        state: (seqlen_local, hidden_size), its part of the last hidden state.
        embedding: (hidden_size,), the sentence embedding, the same on every rank.
        received: A digest of every exchange's result, in call order.
        send_addresses: Where the send buffer of every in-place exchange started, in call order.
        seconds: From the first layer to the pooled embedding, waits for other ranks included.
    """

    state: torch.Tensor
    embedding: torch.Tensor
    received: list[str]
    send_addresses: list[int]
    seconds: float


@torch.no_grad()
def run_rank(
    model: Any, token_ids: torch.Tensor, split_sizes: list[int], layout: Layout, group: Group
) -> RankOutcome:
    """Run this rank's share of the sequence through the model.

    Args:
        model: From `load_encoder(folder, ATTENTION_NAME)`; ranks of one process may share it.
        token_ids: (1, seqlen), int64, the whole sequence; only this rank's tokens are used.
        split_sizes: Tokens each rank owns, in rank order; zero is allowed.
        layout: Who copies, see `Layout`.
        group: The ranks that share the sequence.

    Returns:
        This rank's outcome. Every rank of the group must make the same call.
    """
    process_group = resolve_group(group)
    assert process_group is not None, "the demo runs on two ranks or more"
    rank = process_group.rank()
    exchange = SequenceExchange(group=group, rank=rank, split_sizes=split_sizes, layout=layout)
    start, rows = sum(split_sizes[:rank]), split_sizes[rank]
    # transformers cannot view a sequence of zero tokens as heads, so a rank without tokens carries
    # one stand-in through the layers. It never reaches an exchange, nor the result.
    positions = torch.arange(start, start + rows) if rows else torch.zeros(1, dtype=torch.int64)

    began = time.perf_counter()
    state = model(
        input_ids=token_ids[:, positions], position_ids=positions[None], exchange=exchange
    ).last_hidden_state[0, :rows]
    token_sum = state.sum(dim=0)
    dist.all_reduce(token_sum, group=process_group)
    embedding = sentence_embedding(token_sum, token_ids.shape[1])
    return RankOutcome(
        state=state,
        embedding=embedding,
        received=exchange.received,
        send_addresses=exchange.send_addresses,
        seconds=time.perf_counter() - began,
    )
