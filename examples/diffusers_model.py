"""A diffusers transformer whose image tokens are shared by ranks; the prompt stays whole on each.

python examples/diffusers_model.py                              two ranks in this process
torchrun --nproc-per-node 2 examples/diffusers_model.py         the same function on real processes
"""

from __future__ import annotations

import os

import diffusers
import torch
import torch.distributed as dist

from ulysses_comm import simulate
from ulysses_comm.integrations.diffusers import parallelize


def build() -> torch.nn.Module:
    """Return a small Flux of random weights; the transformer of a released pipeline works alike."""
    torch.manual_seed(0)
    return diffusers.FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=6,
        joint_attention_dim=10,
        pooled_projection_dim=12,
        axes_dims_rope=(2, 2, 4),
    )


def inputs() -> dict[str, torch.Tensor]:
    """Return 15 image tokens and 4 of a prompt; 15 does not divide by two, which is fine."""
    generator = torch.Generator().manual_seed(0)
    places = torch.arange(15)
    return {
        "hidden_states": torch.randn(1, 15, 4, generator=generator),
        "encoder_hidden_states": torch.randn(1, 4, 10, generator=generator),
        "pooled_projections": torch.randn(1, 12, generator=generator),
        "timestep": torch.tensor([0.5]),
        "img_ids": torch.stack([places * 0, places // 5, places % 5], dim=1).float(),
        "txt_ids": torch.zeros(4, 3),
    }


@torch.no_grad()
def compare(group: dist.ProcessGroup) -> None:
    """Call the model on one process and on the ranks of a group."""
    model = build()
    expected = model(**inputs()).sample
    with parallelize(model, group):  # what a user writes
        sample = model(**inputs()).sample
    torch.testing.assert_close(sample, expected)


def main() -> None:
    """Run under torchrun if it started this process, else on simulated ranks."""
    if "LOCAL_RANK" not in os.environ:
        simulate(2, compare)
        print("Two simulated ranks give the sample of one.")
        return
    dist.init_process_group("gloo")
    try:
        compare(dist.group.WORLD)
        print(f"Rank {dist.get_rank()} gives the sample of a single rank.")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
