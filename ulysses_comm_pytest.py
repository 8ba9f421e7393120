"""The pytest plugin of ulysses_comm: fixtures that give a test ranks.

pytest imports this in every run of an environment in which ulysses-comm is installed, so it imports
nothing but pytest; torch and ulysses_comm come in when a test asks for a fixture. It is a module of
its own because a module inside `ulysses_comm` could not be imported without the package.
`-p no:ulysses_comm` leaves it out.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ulysses_comm.testing import GlooRanks, SimulatedRanks

TIMEOUT_OPTION = "ulysses_comm_timeout"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the option of the plugin's section in the ini file."""
    parser.addini(
        TIMEOUT_OPTION,
        help="seconds until gloo_ranks kills processes that are still running (default: 120)",
        default="120",
    )


@pytest.fixture
def simulated_ranks() -> SimulatedRanks:
    """Run `step(group)` on N simulated ranks: `simulated_ranks(4, step).results`.

    See `ulysses_comm.testing.simulated_ranks`.
    """
    from ulysses_comm.testing import simulated_ranks as run

    return run


@pytest.fixture
def gloo_ranks(pytestconfig: pytest.Config) -> GlooRanks:
    """Run `function(group, *args)` on N gloo processes: `gloo_ranks(2, function, argument)`.

    See `ulysses_comm.testing.run_gloo_ranks`.
    """
    from ulysses_comm.testing import run_gloo_ranks

    return functools.partial(run_gloo_ranks, timeout=float(pytestconfig.getini(TIMEOUT_OPTION)))
