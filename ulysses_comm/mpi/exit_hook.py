"""How an MPI process ends that cannot end in order: by ending the whole job.

A process that leaves goes through MPI_Finalize, which waits for the other ranks. They may be
waiting for it, in MPI or in another backend, which may not notice that it has stopped.
"""

from __future__ import annotations

import atexit
import sys
import time

from mpi4py import MPI

# The launcher passes on what a rank has printed in its own time, and drops what it has not read by
# the time the job ends: the traceback, on a busy machine.
_GRACE_SECONDS = 0.5

_installed: list[bool] = []
_failed: list[object] = []


def install() -> None:
    """See to it that this process, if it ends by an error, ends the MPI job."""
    if not _installed:
        _installed.append(True)
        atexit.register(_abort_after_failure)


def mark_failed(reason: object) -> None:
    """Note that this process cannot end in order; `reason` is kept alive with all that it holds."""
    _failed.append(reason)


def _abort_after_failure() -> None:
    """Run when the interpreter exits: after a traceback is printed, before mpi4py finalises MPI."""
    uncaught = getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")
    if MPI.Is_finalized() or MPI.COMM_WORLD.size == 1 or not (_failed or uncaught):
        return
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(_GRACE_SECONDS)
    MPI.COMM_WORLD.Abort(1)
