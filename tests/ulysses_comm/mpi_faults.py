"""What happens on MPI ranks when one is lost: `... mpi_faults FOLDER NAME [BACKEND]`.

Rank 1 is the odd one. Each other rank writes the error that it got, and after how many seconds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ulysses_comm import scatter_seqlen_gather_heads
from ulysses_comm.bootstrap import init_distributed

ODD = 1
SECONDS = 3.0  # the timeout that the group is given
FOR_EVER = 120.0


def exchange() -> None:
    scatter_seqlen_gather_heads(torch.ones(6, 2, 4), [3, 0, 3], dist.group.WORLD)


def killed() -> None:
    if dist.get_rank() == ODD:
        os.kill(os.getpid(), signal.SIGKILL)
    exchange()


def missing() -> None:
    """One rank waits on a handle, with a timeout for that alone; the other has the group's."""
    if dist.get_rank() == ODD:
        time.sleep(FOR_EVER)
    try:
        if dist.get_rank() == 0:
            dist.group.WORLD.set_timeout(timedelta(seconds=FOR_EVER))
            work = dist.barrier(async_op=True)
            work.wait(timedelta(seconds=SECONDS))
        exchange()
    except dist.DistBackendError as error:
        try:
            exchange()
        except dist.DistBackendError as second:
            raise RuntimeError(f"first: {error}\nthen: {second}") from error


def raises() -> None:
    """The odd rank ends by an error of its own while the others wait with a long timeout."""
    if dist.get_rank() == ODD:
        raise KeyError("the odd rank's own trouble")
    if dist.get_backend() == "ulysses_mpi":
        dist.group.WORLD.set_timeout(timedelta(seconds=FOR_EVER))
    exchange()


def makes_no_group() -> None:
    if dist.get_rank() == ODD:
        time.sleep(FOR_EVER)
    dist.new_group([0, 1, 2], timeout=timedelta(seconds=SECONDS))


def main(folder: str, name: str, backend: str = "ulysses_mpi") -> None:
    torch.set_num_threads(1)
    # Under gloo nothing of MPI is in use, but for the ranks: the end is MPI's all the same.
    seconds = FOR_EVER if backend == "gloo" else SECONDS
    init_distributed(backend, device="cpu", timeout=timedelta(seconds=seconds))
    rank = dist.get_rank()
    Path(folder, f"started-{rank}").touch()
    exchange()
    dist.barrier()
    start = time.monotonic()
    try:
        globals()[name]()
    except (RuntimeError, ValueError) as error:
        report: dict[str, Any] = {
            "type": type(error).__name__,
            "text": str(error),
            "seconds": time.monotonic() - start,
        }
        unfinished = Path(folder, f"rank-{rank}.part")
        unfinished.write_text(json.dumps(report))
        unfinished.rename(Path(folder, f"rank-{rank}.json"))
        # Give the others time to see their error too, before this process ends them.
        time.sleep(2.0)
        raise


if __name__ == "__main__":
    main(*sys.argv[1:])
