"""Jobs that fail, die or hang cost their own result and no other."""

from __future__ import annotations

import os
import time

import pytest

from benchmarks.jobs import run_jobs


def work(job: object) -> str:
    if job == "fail":
        raise ValueError("a reason")
    if job == "die":
        os._exit(7)
    if job == "hang":
        time.sleep(60)
    return f"{job} done"


def outcomes(jobs: list[str], **changes: float) -> dict[str, tuple[object, str | None]]:
    settings = {"workers": 1, "seconds": 30.0, "each": 20.0, **changes}
    found = list(run_jobs(work, jobs, **settings))  # type: ignore[arg-type]
    assert sorted(outcome.job for outcome in found) == sorted(jobs)
    return {outcome.job: (outcome.result, outcome.error) for outcome in found}


@pytest.mark.parametrize("workers", [1, 2])
def test_jobs_that_fail_or_die_leave_the_others_alone(workers: int) -> None:
    found = outcomes(["one", "fail", "two", "die", "three"], workers=workers)
    for job in ("one", "two", "three"):
        assert found[job] == (f"{job} done", None)
    assert found["fail"] == (None, found["fail"][1])
    assert str(found["fail"][1]).startswith("ValueError: a reason (work, line")
    assert found["die"] == (None, "its process died with exit code 7")


def test_a_job_that_hangs_is_killed() -> None:
    found = outcomes(["one", "hang", "two"], each=2.0)
    assert found["hang"] == (None, "it took too long and was killed")
    assert found["two"] == ("two done", None)


def test_when_time_is_up_the_rest_is_reported_and_nothing_runs_on() -> None:
    start = time.monotonic()
    found = outcomes(["one", "hang", "two"], seconds=3.0)
    assert time.monotonic() - start < 15
    assert found["one"] == ("one done", None)
    assert found["hang"] == found["two"] == (None, "no time was left")


def test_nothing_to_do_starts_nothing() -> None:
    assert outcomes([]) == {}
