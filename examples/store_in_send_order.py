"""A projection that stores Q, K and V in send order, so that no byte is copied on the way out.

python examples/store_in_send_order.py

Each rank multiplies its tokens straight into the send buffer, one block for each destination.
The exchange recognises the buffer and sends it as it is; the output is read where it was received.
`pack_head_shards` under torch.compile does the same for producers that cannot write with `out=`.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ulysses_comm import (
    as_send_buffer,
    balanced_split_sizes,
    empty_head_shards,
    scatter_heads_gather_seqlen,
    scatter_seqlen_gather_head_shards,
    simulate,
)

WORLD_SIZE = 4
TOKENS, HIDDEN, NUM_HEADS, HEAD_DIM = 1001, 256, 8, 32
HEADS_LOCAL = NUM_HEADS // WORLD_SIZE
SPLIT_SIZES = balanced_split_sizes(TOKENS, WORLD_SIZE)


def step(
    group: dist.ProcessGroup, x: torch.Tensor, weights: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Project this rank's tokens, trade axes there and back without attention in between.

    Args:
        group: The ranks that share the sequence.
        x: (TOKENS, HIDDEN), of which this rank uses its own rows.
        weights: Three of (HIDDEN, NUM_HEADS * HEAD_DIM).

    Returns:
        This rank's rows of the value projection as they came back, and the send buffer.
    """
    mine = x.split(SPLIT_SIZES)[group.rank()]
    shards = empty_head_shards(
        len(mine), group.size(), [HEADS_LOCAL] * 3, HEAD_DIM, x.dtype, x.device
    )
    send_buffer = as_send_buffer(shards, group.size())
    assert send_buffer is not None
    for rank, block in enumerate(send_buffer.flatten(2)):
        # The columns of Q, K and V that belong to this destination, next to each other.
        columns = torch.cat([weight.chunk(group.size(), dim=1)[rank] for weight in weights], dim=1)
        torch.mm(mine, columns, out=block)
    _, _, v = scatter_heads_gather_seqlen(shards, SPLIT_SIZES, group)
    returned = scatter_seqlen_gather_head_shards(v.contiguous(), SPLIT_SIZES, group)
    return returned.flatten(1), send_buffer


def main() -> None:
    """Run on simulated ranks; the record of the traffic is the proof."""
    torch.manual_seed(0)
    x = torch.randn(TOKENS, HIDDEN)
    weights = [torch.randn(HIDDEN, NUM_HEADS * HEAD_DIM) for _ in range(3)]
    simulation = simulate(WORLD_SIZE, lambda group: step(group, x, weights))

    values = torch.cat([value for value, _ in simulation.results])
    torch.testing.assert_close(values, x @ weights[2])
    for rank, (_, send_buffer) in enumerate(simulation.results):
        simulation.traffic.assert_sent_from(send_buffer, rank=rank)
    assert simulation.traffic.copied_bytes == [0] * WORLD_SIZE
    print(simulation.traffic.table())
    print("Sent from where the projection stored it; nothing was copied.")


if __name__ == "__main__":
    main()
