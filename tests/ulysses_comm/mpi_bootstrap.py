"""Ranks that mpirun starts and that exchange over NCCL on GPUs, over gloo elsewhere.

python -m tests.ulysses_comm.mpi_bootstrap --world 2 --device cuda
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from tests import bits
from tests.ulysses_comm.transport_cases import CASES, World
from ulysses_comm import init_distributed
from ulysses_comm.mpi import find_launcher

ROOT = Path(__file__).parents[2]
NAMES = ("head scatters", "output exchanges", "ranks without tokens", "uneven heads", "backward")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--on-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.on_rank:
        run_on_rank(options.device)
        return
    launcher = find_launcher()
    if launcher is None or importlib.util.find_spec("mpi4py") is None:
        raise SystemExit("left out: needs mpirun and mpi4py")
    module = [sys.executable, "-m", "tests.ulysses_comm.mpi_bootstrap", "--on-rank"]
    done = subprocess.run(
        launcher.command(options.world, [*module, "--device", options.device]),
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        timeout=150,
        check=False,
    )
    raise SystemExit(done.returncode)


def run_on_rank(device: str) -> None:
    backend = "nccl" if device == "cuda" else "gloo"
    launch = init_distributed(backend, device=device, timeout=timedelta(seconds=60))
    assert launch.launcher == "mpirun", launch
    bits.TEST_DEVICE = device
    group = dist.group.WORLD
    assert group is not None
    world = World(group, launch.device, "collective")
    for name in NAMES:
        CASES[name](world)
        world.synchronize()
    if world.rank == 0:
        print(f"{len(NAMES)} cases passed on {world.size} ranks of mpirun over {backend}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
