"""A tiny MAGI-2 transformer over any number of ranks, compared with one rank.

python examples/tiny_transformer.py --ranks 8                       all ranks in this process
python examples/tiny_transformer.py --ranks 8 --expert-size 4       experts over runs of four
python examples/tiny_transformer.py --ranks 8 --branches 2          guidance branches apart
torchrun --nproc-per-node 4 examples/tiny_transformer.py            the same on real processes

The request is a conditional and an unconditional sequence of video, audio and text tokens. Each
rank is given all of it, keeps its share, and returns the whole result.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from magi2 import presets
from magi2.initialise import initialise
from magi2.modules.embeddings import time_embedding
from magi2.topology import Topology
from magi2.transformer import Magi2Transformer
from ulysses_comm.simulate import simulate_world

# Ranks multiply fewer rows or heads at a time, so a product may add in another order.
RELATIVE_RMS = 3e-6


def grid(frames: int, rows: int, columns: int) -> torch.Tensor:
    """Coordinates of a grid of tokens: position, size and reference size of each axis."""
    position = torch.cartesian_prod(*(torch.arange(n) for n in (frames, rows, columns)))
    size = torch.tensor([frames, rows, columns] * 2).expand(len(position), -1)
    return torch.cat([position.view(-1, 3), size], dim=1).float()


def request() -> dict[str, torch.Tensor]:
    """Two packed sequences that differ in the length of their text."""
    generator = torch.Generator().manual_seed(0)
    lengths, coords, modality = [0], [], []
    for text in (9, 4):
        parts = [grid(2, 4, 6), grid(12, 1, 1), grid(text, 1, 1)]
        coords += parts
        modality += [torch.full((len(part),), kind) for kind, part in enumerate(parts)]
        lengths.append(lengths[-1] + sum(len(part) for part in parts))
    kinds = torch.cat(modality)
    x = torch.randn(len(kinds), 24, generator=generator)
    time = torch.where(kinds == 2, 0.0, 0.5)
    return {
        "x": x,
        "coords": torch.cat(coords),
        "modality": kinds,
        "cu_seqlens": torch.tensor(lengths),
        "time_tokens": time_embedding(time, 16),
    }


def velocities(topology: Topology | None = None) -> torch.Tensor:
    """Run the model on this rank; the same seed gives every rank its part of the same weights."""
    model = Magi2Transformer(presets.tiny(torch.float32), topology=topology)
    initialise(model, seed=0)
    with torch.no_grad():
        result: torch.Tensor = model(**request())
    return result


def run_rank(branches: int, expert_size: int | None) -> str:
    """Run this rank of the world, compare with a lone rank, and say what it held."""
    shape = (branches, dist.get_world_size() // branches)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("cfg", "sequence"))
    topology = Topology.of_mesh(mesh, cfg="cfg", expert_size=expert_size)
    ours, alone = velocities(topology), velocities()
    error = ((ours - alone).square().mean() / alone.square().mean()).sqrt().item()
    assert error <= RELATIVE_RMS, f"relative RMS {error:.1e} against one rank"
    heads = topology.local_heads(4)
    return (
        f"rank {dist.get_rank()}: branch {topology.cfg_rank}, sequence rank "
        f"{topology.sequence_rank} of {topology.sequence_size}, expert heads {list(heads)}, "
        f"relative RMS {error:.1e}"
    )


def main() -> None:
    """Run under torchrun if it started this process, else on simulated ranks."""
    parser = argparse.ArgumentParser(description="A tiny MAGI-2 transformer over several ranks.")
    parser.add_argument("--ranks", type=int, default=4, help="without torchrun")
    parser.add_argument("--branches", type=int, default=1, choices=(1, 2))
    parser.add_argument("--expert-size", type=int, default=None)
    arguments = parser.parse_args()
    if "LOCAL_RANK" in os.environ:
        dist.init_process_group("gloo")
        print(run_rank(arguments.branches, arguments.expert_size), flush=True)
        dist.barrier()
        dist.destroy_process_group()
        return
    simulation = simulate_world(
        arguments.ranks, lambda: run_rank(arguments.branches, arguments.expert_size)
    )
    print("\n".join(simulation.results))
    print(simulation.traffic)


if __name__ == "__main__":
    main()
