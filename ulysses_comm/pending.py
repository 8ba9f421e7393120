"""The handle of an exchange under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

ResultT = TypeVar("ResultT")
ChangedT = TypeVar("ChangedT")


class Pending(Generic[ResultT]):
    """An exchange that has been started; `wait()` returns what the plain function would have.

    Until then the inputs must not be written to: they may be what is being sent. The handle keeps
    every buffer alive. On a GPU `wait()` makes the current stream wait, not the host.
    """

    def __init__(self, finish: Callable[[], ResultT]) -> None:
        self._finish: Callable[[], ResultT] | None = finish
        self._result: ResultT | None = None

    @classmethod
    def of(cls, result: ResultT) -> Pending[ResultT]:
        """Return a handle of something that is there already."""
        return cls(lambda: result)

    def then(self, change: Callable[[ResultT], ChangedT]) -> Pending[ChangedT]:
        """Return a handle of what `change` makes of this one's result."""
        return Pending(lambda: change(self.wait()))

    def wait(self) -> ResultT:
        """Return the result once it is there; the same result when called again."""
        if self._finish is not None:
            self._result = self._finish()
            self._finish = None
        return self._result  # type: ignore[return-value]  # set above
