"""What a simulation raises when its ranks cannot go on."""

from __future__ import annotations

import sys


class SimulationError(RuntimeError):
    """A simulated world that cannot finish. Every error of the simulator itself derives from it."""


class DeadlockError(SimulationError):
    """No rank can move: each one waits for something that no other rank will do."""


class MismatchError(SimulationError):
    """Ranks met in one collective call and do not agree about it."""


class AsyncMisuseError(SimulationError):
    """A buffer was touched before `wait()`, or the result of a collective was never waited for."""


class AbortedError(SimulationError):
    """Raised in a rank that waits, or that communicates again, after the run has already failed.

    The run itself ends with the first error; this one is only seen inside the other ranks.
    """


def name_rank(error: BaseException, text: str) -> None:
    """Let `error` say which rank it came from, without changing its type, text or traceback.

    From Python 3.11 on this is a note, printed below the traceback. Python 3.10 prints no notes,
    so there the text also becomes the origin of the exception's chain, printed above everything.
    """
    if sys.version_info >= (3, 11):
        error.add_note(text)
        return
    notes = getattr(error, "__notes__", None)
    error.__notes__ = [*(notes or []), text]  # type: ignore[attr-defined]
    origin = error
    seen = {id(origin)}
    while True:
        earlier = origin.__cause__ or (None if origin.__suppress_context__ else origin.__context__)
        if earlier is None or id(earlier) in seen:
            break
        origin = earlier
        seen.add(id(origin))
    origin.__context__ = SimulationError(text)
    origin.__suppress_context__ = False
