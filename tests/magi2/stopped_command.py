"""`magi2` as a command that sends itself a signal, or raises, once a step is done on a rank.

    python -m tests.magi2.stopped_command RANK STEP SIGNAL generate ...

SIGNAL is the name of a signal, or "error".
"""

from __future__ import annotations

import os
import signal
import sys

import magi2.pipeline
from magi2.cli.app import main


def stop_at(rank: int, step: int, how: str, replace=setattr) -> None:
    """Let the pipeline stop where it is told, by `replace(object, name, value)`."""
    true_call = magi2.pipeline._Steps.__call__

    def call(self, state):
        true_call(self, state)
        if self.ranks.rank == rank and state.step == step:
            if how == "error":
                raise ValueError("the odd rank's own trouble")
            os.kill(os.getpid(), signal.Signals[how])

    replace(magi2.pipeline._Steps, "__call__", call)


if __name__ == "__main__":
    stop_at(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    del sys.argv[1:4]
    main()
