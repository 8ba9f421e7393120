"""The smallest exchange: attention over five tokens that two ranks share, three and two.

python examples/two_ranks.py                              both ranks in this process
torchrun --nproc-per-node 2 examples/two_ranks.py         the same function on real processes
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from ulysses_comm import scatter_heads_gather_seqlen, scatter_seqlen_gather_heads, simulate

SPLIT_SIZES = [3, 2]
NUM_HEADS, HEAD_DIM = 4, 8


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attend with each head over all tokens given; (tokens, heads, head_dim) in and out."""
    heads_first = [tensor.transpose(0, 1) for tensor in (q, k, v)]
    return scaled_dot_product_attention(*heads_first).transpose(0, 1).contiguous()


def attend(group: dist.ProcessGroup) -> torch.Tensor:
    """Attend from one rank, which holds only its own tokens, and compare with a single rank."""
    shape = (sum(SPLIT_SIZES), NUM_HEADS, HEAD_DIM)
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(shape, generator=generator) for _ in range(3)]
    mine = [tensor.split(SPLIT_SIZES)[group.rank()] for tensor in whole]

    q, k, v = scatter_heads_gather_seqlen(mine, SPLIT_SIZES, group)
    assert q.shape == (5, 2, 8), "every token, and this rank's two heads"
    output = scatter_seqlen_gather_heads(attention(q, k, v), SPLIT_SIZES, group)
    assert output.shape == (SPLIT_SIZES[group.rank()], 4, 8), "this rank's tokens, and every head"

    torch.testing.assert_close(output, attention(*whole).split(SPLIT_SIZES)[group.rank()])
    return output


def main() -> None:
    """Run under torchrun if it started this process, else on simulated ranks."""
    if "LOCAL_RANK" not in os.environ:
        simulation = simulate(len(SPLIT_SIZES), attend)
        print(simulation.traffic.table())
        print("Two simulated ranks agree with one.")
        return
    dist.init_process_group("gloo")
    try:
        attend(dist.group.WORLD)
        print(f"Rank {dist.get_rank()} agrees with a single rank.")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
