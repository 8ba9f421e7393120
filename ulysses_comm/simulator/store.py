"""A key-value store whose readers wait in lock step, so that a missing key is a deadlock."""

from __future__ import annotations

from collections.abc import Sequence

from torch._C._distributed_c10d import Store

from ulysses_comm.simulator.errors import SimulationError
from ulysses_comm.simulator.scheduler import Scheduler, current_rank


class _KeyWait:
    def __init__(self, owner: str, missing: set[str]) -> None:
        self.owner = owner
        self.missing = missing
        self.done = not missing

    def describe(self) -> str:
        return (
            f"a wait for {', '.join(map(repr, sorted(self.missing)))} in the store of {self.owner}"
        )


class SimulatedStore(Store):
    """What torch.distributed calls a store, for the ranks of one simulation.

    Timeouts never pass: a key that no rank can set any more is reported as a deadlock at once.

    Args:
        scheduler: Runs the ranks.
        owner: Whose store it is, for reports.
    """

    def __init__(self, scheduler: Scheduler, owner: str) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._owner = owner
        self._values: dict[str, bytes] = {}
        self._waits: list[_KeyWait] = []

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._put(key, _as_bytes(value))

    def get(self, key: str) -> bytes:
        """Return the value of a key, once it is set."""
        while key not in self._values:
            self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: object = None) -> None:
        """Return once all keys are set."""
        wait = self._wait_for(keys)
        if wait.done:
            return
        self._waits.append(wait)
        try:
            self._scheduler.block(self._rank(wait), wait)
        finally:
            self._waits.remove(wait)

    def check(self, keys: Sequence[str]) -> bool:
        """Tell whether all keys are set; if not, the other ranks run on first."""
        wait = self._wait_for(keys)
        if wait.done:
            return True
        self._waits.append(wait)
        try:
            return self._scheduler.poll(self._rank(wait), wait)
        finally:
            self._waits.remove(wait)

    def add(self, key: str, value: int) -> int:
        """Add to a counter that starts from 0, and return its new value."""
        total = int(self._values.get(key, b"0")) + value
        self._put(key, str(total).encode())
        return total

    def append(self, key: str, value: str | bytes) -> None:
        """Append to a value that starts empty."""
        self._put(key, self._values.get(key, b"") + _as_bytes(value))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a key if it has the expected value, or is not set and nothing is expected."""
        present = self._values.get(key)
        expected = _as_bytes(expected)
        if present == expected or (present is None and not expected):
            self._put(key, _as_bytes(desired))
        return self._values.get(key, expected)

    def delete_key(self, key: str) -> bool:
        """Remove a key; tell whether it was set."""
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """Return the number of keys."""
        return len(self._values)

    def list_keys(self) -> list[str]:
        """Return the keys in alphabetical order."""
        return sorted(self._values)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of several keys, once all are set."""
        self.wait(keys)
        return [self._values[key] for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set several keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        """Tell that append, multi_get and multi_set exist."""
        return True

    def _put(self, key: str, value: bytes) -> None:
        self._scheduler.note_progress()
        self._values[key] = value
        for wait in self._waits:
            wait.missing.discard(key)
            wait.done = not wait.missing

    def _wait_for(self, keys: Sequence[str]) -> _KeyWait:
        return _KeyWait(self._owner, {key for key in keys if key not in self._values})

    def _rank(self, wait: _KeyWait) -> int:
        current = current_rank()
        if current is None or current[0] is not self._scheduler:
            raise SimulationError(f"{wait.describe()} from a thread that is no rank of it")
        return current[1]


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
