"""Do all ranks mean the same exchange? Asked through the group's store, before data moves.

A backend does not check this: on gloo, ranks that disagree on counts get stale bytes or lose their
process; on NCCL they wait for ever. The question is asked on the host, through the key-value store
that made the group, so it needs no collective, names the ranks, and ends in time when one is gone.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist

DEFAULT_TIMEOUT = timedelta(seconds=10)
"""How long `validate=True` waits for the other ranks."""

ENVIRONMENT_SWITCH = "ULYSSES_COMM_VALIDATE"
"""Set to 1, every exchange behaves as if called with validate=True."""


class RankDisagreementError(RuntimeError):
    """Ranks mean different exchanges, or one is missing; every rank gets the same text."""


class Agreement:
    """Compares each layout once: pass one object as `validate=` to all exchanges of a loop.

    The first exchange of a layout (function, split sizes, heads, dtypes) is compared as with
    `validate=True`; from then on it goes ahead without asking, on every rank: what the ranks have
    agreed on stands in the group's store, so a rank whose object is new, or that cleared it, finds
    it there instead of waiting for ranks that no longer ask. A steady loop pays a look-up.

    What it gives up: a rank that alone turns to a layout not agreed on yet gets its error in time,
    while ranks that turn to one they know are in the collective already, and end by the group's own
    timeout or when that rank goes. `validate=True` stops all of them before data moves.

    Args:
        timeout: How long to wait for the other ranks.
    """

    def __init__(self, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
        self.timeout = timeout
        self._agreed: set[tuple[str, str]] = set()

    def knows(self, group: dist.ProcessGroup, layout: str) -> bool:
        """Whether the ranks of the group have agreed on a layout before."""
        known = (group.group_name, layout)
        if known not in self._agreed:
            if not group.get_group_store().check([_agreed_key(layout)]):
                return False
            self._agreed.add(known)
        return True

    def remember(self, group: dist.ProcessGroup, layout: str) -> None:
        """Note for every rank, present or future, that all have agreed on a layout."""
        group.get_group_store().set(_agreed_key(layout), "1")
        self._agreed.add((group.group_name, layout))

    def clear(self) -> None:
        """Forget what this rank has seen; the group's store still knows."""
        self._agreed.clear()


Validate: TypeAlias = "bool | timedelta | Agreement"
"""Whether ranks compare what they mean to exchange: never, at every call (a timedelta sets how long
to wait for the others), or once for each layout (an `Agreement`)."""


class Checked(Protocol):
    """A checked call that can say what all ranks must have in common."""

    def facts(self) -> dict[str, object]:
        """Names and values to compare."""
        ...


CheckedT = TypeVar("CheckedT", bound=Checked)


def agree(
    check: Callable[[], CheckedT],
    group: dist.ProcessGroup | None,
    validate: Validate,
    *,
    way: Callable[[CheckedT], str | None] | None = None,
) -> CheckedT:
    """Run this rank's own check and, if asked to, compare its outcome with the other ranks'.

    Args:
        check: Checks the arguments of one exchange on this rank; ValueError for bad input.
        group: The ranks of the exchange; None for a lone rank.
        validate: Whether to compare.
        way: Says how what `check` returned would travel, where ranks have to take one way.

    Returns:
        What `check` returned.

    Raises:
        ValueError: From `check`; the other ranks are told, and raise `RankDisagreementError`. Also
            if validate is none of its kinds, or is asked for inside torch.compile.
        RankDisagreementError: If ranks disagree, or one refused its input or did not arrive. After
            a missing rank the checks of the group are out of step: end the run.

    Without `validate` this costs nothing but the check.
    """
    timeout = _timeout(validate)
    if timeout is None or group is None or group.size() == 1:
        return check()
    try:
        checked = check()
        facts = checked.facts()
        if way is not None and (name := way(checked)) is not None:
            facts["transport"] = name
        layout = json.dumps(facts)
    except Exception as error:
        _post(group, json.dumps({"refused": f"{type(error).__name__}: {error}"}))
        raise
    if not isinstance(validate, Agreement):
        _compare(group, str(facts["exchange"]), layout, timeout)
    elif not validate.knows(group, layout):
        _compare(group, str(facts["exchange"]), layout, timeout)
        validate.remember(group, layout)
    return checked


def _timeout(validate: Validate) -> timedelta | None:
    """Return how long to wait for the other ranks; None to ask nothing."""
    if validate is False:
        return None if torch.compiler.is_compiling() or not _switched_on() else DEFAULT_TIMEOUT
    if not isinstance(validate, bool | timedelta | Agreement):
        raise ValueError(
            f"validate={validate!r}: expected True, False, a datetime.timedelta or an Agreement."
        )
    if torch.compiler.is_compiling():
        raise ValueError(
            "validate cannot ask the other ranks from inside torch.compile: leave it out there, or "
            "call the exchange outside the compiled region."
        )
    if isinstance(validate, timedelta):
        return validate
    return validate.timeout if isinstance(validate, Agreement) else DEFAULT_TIMEOUT


def _switched_on() -> bool:
    value = os.environ.get(ENVIRONMENT_SWITCH, "").lower()
    if value in ("", "0", "false", "no", "off"):
        return False
    if value in ("1", "true", "yes", "on"):
        return True
    raise ValueError(f"{ENVIRONMENT_SWITCH}={value!r} in the environment: expected 1 or 0.")


_PREFIX = "ulysses_comm/agreement"


def _key(call: int, rank: int) -> str:
    return f"{_PREFIX}/{call}/{rank}"


def _agreed_key(layout: str) -> str:
    return f"{_PREFIX}/agreed/{hashlib.sha256(layout.encode()).hexdigest()}"


def _post(group: dist.ProcessGroup, text: str) -> int:
    """Publish this rank's facts; return how many calls of this group it has published."""
    store = group.get_group_store()
    # The count lives in the store, so that all checked calls of a group share it.
    call: int = store.add(f"{_PREFIX}/calls/{group.rank()}", 1)
    store.set(_key(call, group.rank()), text)
    return call


def _compare(group: dist.ProcessGroup, exchange: str, text: str, timeout: timedelta) -> None:
    call = _post(group, text)
    posted = _collect(group, call, timeout)
    missing = [rank for rank, text in enumerate(posted) if text is None]
    complaint = ""
    if missing:
        complaint = (
            f"{exchange}, call {call} that is checked in this group: {_ranks(missing)} of "
            f"{group.size()} did not arrive within {timeout.total_seconds():g} s. A rank raised, "
            "left early, went to something else, or knew its layout from before (Agreement); "
            "nothing was sent from here. If it is only slow, pass validate=timedelta(...)."
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
