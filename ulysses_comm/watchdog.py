"""What becomes of a rank whose NCCL peers are lost: torch's watchdog, as the environment has it.

The variables are torch's (ProcessGroupNCCL.hpp), read when a group is made. Seen on GPUs with torch
2.11: waiting on the host, 1 as the way to handle errors, and the default with a dump of 250 ms. The
default of 15 s was only seen not to have ended a rank earlier.
"""

from __future__ import annotations

from collections.abc import Mapping

# Older names count, too.
_BLOCKING = ("TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT")
_HANDLING = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING")
_DUMP = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"
_TRUE = {"y", "yes", "1", "t", "true"}

# What each way to handle errors comes to; the default, 3, ends the process and no more.
_WAYS = {
    "0": "no rank is ended whose peers are lost: it waits for ever",
    "1": "a rank whose peers are lost goes on with wrong data until it is ended",
    "2": "a rank whose peers are lost goes on with wrong data and is not ended",
}


def watchdog_problem(environment: Mapping[str, str]) -> str:
    """Say which variable keeps torch from ending a rank in time; empty if none does.

    Args:
        environment: Of the process.
    """
    name, value = _first(environment, _BLOCKING)
    if value.lower() in _TRUE:
        return (
            f"{name}={value}: torch starts no watchdog then, and a rank whose peers are lost waits "
            f"for ever; unset {name}"
        )
    name, value = _first(environment, _HANDLING)
    if value in _WAYS:
        return f"{name}={value}: {_WAYS[value]}; unset {name}"
    return ""


def explain_watchdog(environment: Mapping[str, str]) -> str:
    """Say when torch ends a rank whose NCCL peers are lost, or why it does not.

    Args:
        environment: Of the process.
    """
    problem = watchdog_problem(environment)
    if problem:
        return problem
    given = environment.get(_DUMP, "")
    # Before the end all ranks get this long, four times over, to write down what they were doing.
    seconds = 4 * (int(given) if given.isdigit() else 15000) / 1000
    return (
        f"a rank whose peers are lost is ended {seconds:g} s after the group's timeout "
        f"({_DUMP}={given or 'unset'})"
    )


def _first(environment: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, str]:
    return next(((name, environment[name]) for name in names if name in environment), ("", ""))
