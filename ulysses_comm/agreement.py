"""Do all ranks mean the same exchange? Asked through the group's store, before data moves.

A backend does not check this: on gloo, ranks that disagree on counts get stale bytes or lose their
process; on NCCL they wait for ever. The question is asked on the host, through the key-value store
that made the group, so it needs no collective, names the ranks, and ends in time when one is gone.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

DEFAULT_TIMEOUT = timedelta(seconds=10)
"""How long `validate=True` waits for the other ranks."""

ENVIRONMENT_SWITCH = "ULYSSES_COMM_VALIDATE"
"""Set to 1, every exchange behaves as if called with validate=True."""


class RankDisagreementError(RuntimeError):
    """Ranks mean different exchanges, or one is missing; every rank gets the same text."""


class Checked(Protocol):
    """A checked call that can say what all ranks must have in common."""

    def facts(self) -> dict[str, object]:
        """Names and values to compare."""
        ...


CheckedT = TypeVar("CheckedT", bound=Checked)


def agree(
    check: Callable[[], CheckedT], group: dist.ProcessGroup | None, validate: bool | timedelta
) -> CheckedT:
    """Run this rank's own check and, if asked to, compare its outcome with the other ranks'.

    Args:
        check: Checks the arguments of one exchange on this rank; ValueError for bad input.
        group: The ranks of the exchange; None for a lone rank.
        validate: Whether to compare; a timedelta says how long to wait for the others.

    Returns:
        What `check` returned.

    Raises:
        ValueError: From `check`; the other ranks are told, and raise `RankDisagreementError`.
        RankDisagreementError: If ranks disagree, or one refused its input or did not arrive.

    Without `validate` this costs nothing but the check.
    """
    timeout = _timeout(validate)
    if timeout is None or group is None or group.size() == 1:
        return check()
    try:
        checked = check()
    except ValueError as error:
        _post(group, {"refused": str(error)})
        raise
    _compare(group, checked.facts(), timeout)
    return checked


def _timeout(validate: bool | timedelta) -> timedelta | None:
    if isinstance(validate, timedelta):
        return validate
    if validate:
        return DEFAULT_TIMEOUT
    if torch.compiler.is_compiling():
        return None
    return DEFAULT_TIMEOUT if os.environ.get(ENVIRONMENT_SWITCH, "0") not in ("", "0") else None


_PREFIX = "ulysses_comm/agreement"


def _key(call: int, rank: int) -> str:
    return f"{_PREFIX}/{call}/{rank}"


def _post(group: dist.ProcessGroup, facts: dict[str, object]) -> int:
    """Publish this rank's facts; return how many calls of this group it has published."""
    store = group.get_group_store()
    # The count lives in the store, so that this package keeps no state of its own.
    call: int = store.add(f"{_PREFIX}/calls/{group.rank()}", 1)
    store.set(_key(call, group.rank()), json.dumps(facts))
    return call


def _compare(group: dist.ProcessGroup, facts: dict[str, object], timeout: timedelta) -> None:
    call = _post(group, facts)
    posted = _collect(group, call, timeout)
    missing = [rank for rank, text in enumerate(posted) if text is None]
    complaint = ""
    if missing:
        complaint = (
            f"{facts['exchange']}, call {call} that is checked in this group: {_ranks(missing)} of "
            f"{group.size()} did not arrive within {timeout.total_seconds():g} s. A rank raised, "
            "left early, or went to something else; nothing was sent. If it is only slow, pass "
            "validate=timedelta(...)."
        )
    else:
        _raise_if_different(call, posted)
    # Ranks that waited in vain and one that comes late must not part ways: the first to speak
    # decides for all whether this exchange takes place.
    verdict = _decide(group, call, complaint)
    if verdict:
        raise RankDisagreementError(verdict)
    if missing:
        _raise_if_different(call, _collect(group, call, timeout))
    _forget(group, call - 1)


def _raise_if_different(call: int, posted: list[str | None]) -> None:
    known = [json.loads(text) for text in posted if text is not None]
    report = _refusals(known) or _differences(known)
    if report:
        raise RankDisagreementError(
            f"The ranks disagree in call {call} that is checked in this group; nothing was sent.\n"
            + "\n".join(f"  {line}" for line in report)
        )


def _decide(group: dist.ProcessGroup, call: int, complaint: str) -> str:
    """Return the complaint of whichever rank speaks first; empty if the exchange takes place."""
    store = group.get_group_store()
    if store.add(f"{_PREFIX}/{call}/votes", 1) == 1:
        store.set(f"{_PREFIX}/{call}/verdict", json.dumps(complaint))
        return complaint
    store.wait([f"{_PREFIX}/{call}/verdict"], DEFAULT_TIMEOUT)
    verdict: str = json.loads(store.get(f"{_PREFIX}/{call}/verdict"))
    return verdict


def _forget(group: dist.ProcessGroup, call: int) -> None:
    """Delete what this rank wrote for a call that every rank has passed."""
    if call < 1:
        return
    store = group.get_group_store()
    store.delete_key(_key(call, group.rank()))
    if group.rank() == 0:
        store.delete_key(f"{_PREFIX}/{call}/votes")
        store.delete_key(f"{_PREFIX}/{call}/verdict")


def _collect(group: dist.ProcessGroup, call: int, timeout: timedelta) -> list[str | None]:
    store = group.get_group_store()
    deadline = time.monotonic() + timeout.total_seconds()
    posted: list[str | None] = []
    for rank in range(group.size()):
        left = max(deadline - time.monotonic(), 0.001)
        try:
            store.wait([_key(call, rank)], timedelta(seconds=left))
        except dist.DistNetworkError as error:
            raise RankDisagreementError(
                "The store that made this group does not answer: the rank that hosts it, rank 0 as "
                "a rule, has ended. Look for its error; nothing was sent."
            ) from error
        except RuntimeError:
            # Stores differ in what they raise when time is up; anything earlier is another fault.
            if time.monotonic() < deadline:
                raise
            posted.append(None)
        else:
            posted.append(store.get(_key(call, rank)).decode())
    return posted


def _refusals(posted: list[dict[str, object]]) -> list[str]:
    return [
        f"rank {rank} refused its own input: {facts['refused']}"
        for rank, facts in enumerate(posted)
        if "refused" in facts
    ]


def _differences(posted: list[dict[str, object]]) -> list[str]:
    names = dict.fromkeys(name for facts in posted for name in facts)
    if len({facts["exchange"] for facts in posted}) > 1:
        names = {"exchange": None}  # the rest follows from it
    lines = []
    for name in names:
        ranks_by_value: dict[str, list[int]] = {}
        for rank, facts in enumerate(posted):
            ranks_by_value.setdefault(json.dumps(facts.get(name)), []).append(rank)
        if len(ranks_by_value) > 1:
            values = [f"{value} on {_ranks(ranks)}" for value, ranks in ranks_by_value.items()]
            lines.append(f"{name}: " + ", ".join(values))
    return lines


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
