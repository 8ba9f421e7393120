"""MPI as a torch.distributed backend, over mpi4py; and what is known of the MPI at hand.

Importing this starts nothing. `ulysses_comm.bootstrap.init_distributed` under mpirun registers the
backend and joins it; `register_backend` does the first half for a program that calls
`torch.distributed.init_process_group("ulysses_mpi", ...)` itself. The rules are in
`docs/platforms.md`.
"""

from ulysses_comm.mpi.backend import BACKEND, MPIOptions, end_job_after_failure, register_backend
from ulysses_comm.mpi.launcher import Launcher, find_launcher
from ulysses_comm.mpi.library import load_mpi

__all__ = [
    "BACKEND",
    "Launcher",
    "MPIOptions",
    "end_job_after_failure",
    "find_launcher",
    "load_mpi",
    "register_backend",
]
