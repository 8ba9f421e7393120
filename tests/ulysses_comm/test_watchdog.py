"""When torch ends a rank whose NCCL peers are lost, and that users hear of it where it does not."""

from __future__ import annotations

import logging

import pytest
import torch

from ulysses_comm import bootstrap, findings
from ulysses_comm.bootstrap import Launch, init_distributed
from ulysses_comm.hardware import Choice
from ulysses_comm.watchdog import explain_watchdog, watchdog_problem


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({}, "ended 60 s after the group's timeout"),
        ({"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250"}, "ended 1 s after the group's timeout"),
        ({"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "soon"}, "ended 60 s after"),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}, "ended 60 s after"),
        ({"TORCH_NCCL_BLOCKING_WAIT": "0"}, "ended 60 s after"),
    ],
)
def test_a_rank_that_lost_its_peers_is_ended(environment: dict[str, str], says: str) -> None:
    assert watchdog_problem(environment) == ""
    assert says in explain_watchdog(environment)


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, "no watchdog"),
        ({"NCCL_BLOCKING_WAIT": "True"}, "no watchdog"),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, "waits for ever"),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}, "wrong data until it is ended"),
        ({"NCCL_ASYNC_ERROR_HANDLING": "2"}, "is not ended"),
        # The newer name counts where both are set.
        ({"TORCH_NCCL_BLOCKING_WAIT": "1", "NCCL_BLOCKING_WAIT": "0"}, "no watchdog"),
    ],
)
def test_what_keeps_torch_from_it_is_named(environment: dict[str, str], says: str) -> None:
    problem = watchdog_problem(environment)
    assert says in problem
    name = next(iter(environment))
    assert problem.startswith(f"{name}={environment[name]}: ")
    assert problem.endswith(f"unset {name}")
    assert explain_watchdog(environment) == problem


@pytest.mark.parametrize(("backend", "warns"), [("nccl", True), ("gloo", False)])
def test_a_start_over_nccl_warns(
    backend: str,
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    launch = Launch(
        launcher="bare", rank=0, world_size=1, local_rank=0, device=torch.device("cpu"),
        backend=Choice(backend, "a test"),
    )  # fmt: skip
    monkeypatch.setattr(bootstrap, "_start_alone", lambda *_: launch)
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    with caplog.at_level(logging.WARNING, logger="ulysses_comm"):
        assert init_distributed(launcher="bare") is launch
    assert ("TORCH_NCCL_BLOCKING_WAIT=1" in caplog.text) is warns


def test_the_doctor_tells_where_torch_is_built_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "waits for ever" in dict(findings.facts())["NCCL watchdog"]
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "NCCL watchdog" not in dict(findings.facts())
