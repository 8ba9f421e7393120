"""Swap a layer's attention for one over a sharded sequence: one line, the same results.

python examples/attention_swap.py                              three ranks in this process
torchrun --nproc-per-node 3 examples/attention_swap.py         the same function on real processes
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from ulysses_comm import UlyssesAttention, shard_sequence, simulate, sum_gradients, sum_losses

SPLIT_SIZES = [4, 2, 5]  # tokens of each rank; any share will do
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 8  # over three ranks: no head count has to divide


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention, (batch, heads, tokens, head_dim); any other function would do."""
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Layer(torch.nn.Module):
    """What a model has: projections around an attention that it calls."""

    def __init__(self) -> None:
        super().__init__()
        width = NUM_HEADS * HEAD_DIM
        self.q = torch.nn.Linear(width, width)
        self.kv = torch.nn.Linear(width, 2 * NUM_KV_HEADS * HEAD_DIM)
        self.out = torch.nn.Linear(width, width)
        self.attention = attention

    def forward(self, x: torch.Tensor, **kwargs: object) -> torch.Tensor:
        """Map (batch, tokens, width) to the same."""
        q, kv = (t.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for t in (self.q(x), self.kv(x)))
        output = self.attention(q, *kv.chunk(2, dim=1), **kwargs)
        return self.out(output.transpose(1, 2).flatten(2))


def train(group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """Return the loss and the gradients of one step, on one rank (None) or on those of a group."""
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(2, sum(SPLIT_SIZES), NUM_HEADS * HEAD_DIM)
    if group is None:
        loss = layer(x).square().sum()
        loss.backward()
    else:
        layer.attention = UlyssesAttention(attention, group=group, layout="bhsd")  # the swap
        mine = shard_sequence(x, group, SPLIT_SIZES)
        loss = sum_losses(layer(mine, split_sizes=SPLIT_SIZES).square().sum(), group)
        loss.backward()
        sum_gradients(layer.parameters(), group)
    return [loss.detach(), *(parameter.grad for parameter in layer.parameters())]


def compare(group: dist.ProcessGroup) -> None:
    """Hold a rank's loss and gradients against one process."""
    for sharded, whole in zip(train(group), train(None), strict=True):
        torch.testing.assert_close(sharded, whole, rtol=1e-4, atol=1e-4)


def main() -> None:
    """Run under torchrun if it started this process, else on simulated ranks."""
    if "LOCAL_RANK" not in os.environ:
        simulate(len(SPLIT_SIZES), compare)
        print("Three simulated ranks have the loss and the gradients of one.")
        return
    dist.init_process_group("gloo")
    try:
        compare(dist.group.WORLD)
        print(f"Rank {dist.get_rank()} has the loss and the gradients of a single rank.")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
