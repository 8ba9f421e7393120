"""The fixtures for users' test suites, in test suites of their own, and the launcher beneath."""

from __future__ import annotations

import importlib.metadata
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ulysses_comm import scatter_seqlen_gather_heads
from ulysses_comm.testing import RanksFailedError, run_gloo_ranks, simulated_ranks

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
INSTALLED = any(
    point.name == "ulysses_comm" for point in importlib.metadata.entry_points(group="pytest11")
)

USERS_TESTS = """
import pytest, torch, torch.distributed as dist
from ulysses_comm import scatter_heads_gather_seqlen

WHOLE = torch.arange(7 * 8 * 2.0).view(7, 8, 2)

def step(group, splits):
    mine = WHOLE.split(splits)[group.rank()]
    (gathered,) = scatter_heads_gather_seqlen([mine], splits, group)
    return gathered

def check(results):
    assert torch.equal(torch.cat(results, dim=1), WHOLE)

def test_simulated(simulated_ranks):
    simulation = simulated_ranks(4, lambda group: step(group, [3, 0, 2, 2]))
    check(simulation.results)
    assert simulation.traffic is not None
    draws = [simulated_ranks(2, lambda group: float(torch.rand(1))).results for _ in range(2)]
    assert draws[0] == draws[1] and draws[0][0] != draws[0][1]

def test_gloo(gloo_ranks):
    check(gloo_ranks(2, step, [5, 2]))

def fails_on_rank_1(group):
    assert group.rank() == 0, "the reason is shown"
    dist.barrier()

def test_failing(gloo_ranks):
    gloo_ranks(2, fails_on_rank_1)

def test_timeout(gloo_ranks):
    assert gloo_ranks.keywords["timeout"] == 77.0
"""


@pytest.fixture
def users_suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeini("[pytest]\naddopts = --import-mode=importlib\nulysses_comm_timeout = 77\n")
    return pytester


def plugin() -> list[str]:
    return [] if INSTALLED else ["-p", "ulysses_comm_pytest"]


@pytest.mark.gloo
def test_example_in_the_documentation_passes(users_suite: pytest.Pytester) -> None:
    text = (ROOT / "docs" / "testing.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    users_suite.makepyfile(test_documented=example)
    users_suite.runpytest_subprocess(*plugin()).assert_outcomes(passed=2)


@pytest.mark.gloo
def test_fixtures_give_ranks_to_a_users_suite(users_suite: pytest.Pytester) -> None:
    folder = users_suite.mkdir("checks")  # no package: no name that leads to the file
    (folder / "test_ranks.py").write_text(USERS_TESTS)
    result = users_suite.runpytest_subprocess(*plugin(), "-p", "no:cacheprovider", "checks")
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(["*rank 1 raised after*", "*the reason is shown*"])


def test_plugin_imports_neither_torch_nor_the_package(users_suite: pytest.Pytester) -> None:
    users_suite.makepyfile(
        """
        import sys

        def test_nothing_came_along(pytestconfig):
            assert "ulysses_comm_pytest" in sys.modules
            assert not {"torch", "numpy", "ulysses_comm"} & set(sys.modules)
        """
    )
    result = users_suite.runpytest_subprocess(*plugin())
    result.assert_outcomes(passed=1)


def test_plugin_is_declared_to_pytest() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert '[project.entry-points.pytest11]\nulysses_comm = "ulysses_comm_pytest"\n' in text
    assert 'py-modules = ["ulysses_comm_pytest"]' in text


def report(group: dist.ProcessGroup, *args: Any) -> dict[str, Any]:
    return {
        "rank": group.rank(),
        "size": group.size(),
        "args": args,
        "draw": torch.rand(2),
        "variable": os.environ.get("ULYSSES_TEST_VARIABLE"),
        "folder": os.getcwd(),
    }


def is_lost(group: dist.ProcessGroup, how: str) -> None:
    scatter_seqlen_gather_heads(torch.ones(4, 1, 2), [2] * group.size(), group)
    if group.rank() == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "stopped":
            time.sleep(60)
        raise KeyError("the odd rank's own trouble")
    scatter_seqlen_gather_heads(torch.ones(4, 1, 2), [2] * group.size(), group)


def sleeps(group: dist.ProcessGroup) -> None:
    time.sleep(60 if group.rank() == 1 else 0)


@pytest.mark.gloo
def test_gloo_ranks_return_results_in_rank_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ULYSSES_TEST_VARIABLE", "caller's")
    results = run_gloo_ranks(2, report, {"x": torch.ones(2)}, seed=3)
    assert [result["rank"] for result in results] == [0, 1]
    assert {result["size"] for result in results} == {2}
    assert all(torch.equal(result["args"][0]["x"], torch.ones(2)) for result in results)
    torch.manual_seed(3)
    draw = torch.rand(2)
    assert all(torch.equal(result["draw"], draw) for result in results)
    assert {result["variable"] for result in results} == {"caller's"}
    assert {result["folder"] for result in results} == {os.getcwd()}
    environment = {"ULYSSES_TEST_VARIABLE": "ours"}
    (result,) = run_gloo_ranks(1, report, environment=environment)
    assert result["variable"] == "ours"


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("how", "words", "at_least"),
    [("killed", "by peer", 0.0), ("raised", "by peer", 0.0), ("stopped", "imed out", 1.5)],
)
def test_a_lost_gloo_rank_is_an_error_within_the_timeout(
    how: str, words: str, at_least: float
) -> None:
    """Killed, raising or stuck: the other rank raises no later than the timeout it was given."""
    with pytest.raises(RanksFailedError) as caught:
        run_gloo_ranks(2, is_lost, how, group_timeout=2.0, timeout=20.0)
    waiting, odd = caught.value.outcomes
    assert "RuntimeError" in waiting.error_types, waiting
    assert words in waiting.error, waiting.error
    assert at_least <= waiting.seconds < 4.0
    if how == "killed":
        assert odd.exit_code == -signal.SIGKILL
        assert f"rank 1 died with exit code {-signal.SIGKILL}" in str(caught.value)
    if how == "raised":
        assert odd.error_types[0] == "KeyError"
        assert str(caught.value).startswith("rank 1 raised"), "the first error comes first"
    if how == "stopped":
        assert odd.exit_code is None
        assert "rank 1 was still running and was killed" in str(caught.value)


@pytest.mark.gloo
def test_ranks_that_do_not_end_are_killed() -> None:
    start = time.monotonic()
    with pytest.raises(RanksFailedError, match="rank 1 was still running and was killed"):
        run_gloo_ranks(2, sleeps, timeout=6.0)
    assert time.monotonic() - start < 12.0


def test_functions_that_no_process_can_import_are_refused() -> None:
    def local(group: Any) -> None: ...

    for function in (local, lambda group: None, report.__call__):
        with pytest.raises(ValueError, match="defined at the level of its module"):
            run_gloo_ranks(2, function)


def test_simulated_ranks_take_the_options_of_simulate() -> None:
    assert simulated_ranks(3, lambda group: group.rank()).results == [0, 1, 2]
    drawn = [simulated_ranks(1, lambda group: torch.rand(1), seed=s).results[0] for s in (0, 0, 1)]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]


@pytest.mark.parametrize(
    ("world_size", "options", "message"),
    [
        (0, {}, "world_size=0: expected one rank or more"),
        (2, {"timeout": 0.0}, "timeout=0.0: expected a positive number of seconds"),
        (2, {"timeout": float("nan")}, "timeout=nan"),
        (2, {"group_timeout": -1.0}, "group_timeout=-1.0"),
    ],
)
def test_gloo_ranks_refuse_what_would_run_nothing(
    world_size: int, options: dict[str, Any], message: str
) -> None:
    """No ranks would be a test that cannot fail."""
    with pytest.raises(ValueError, match=message):
        run_gloo_ranks(world_size, os.getpid, **options)
