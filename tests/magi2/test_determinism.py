"""What the deterministic mode sets, puts back, and refuses."""

from __future__ import annotations

import contextlib

import pytest
import torch

from magi2 import determinism
from magi2.determinism import deterministic_mode


def settings():
    return determinism._read()


def test_mode_sets_everything_and_puts_it_back():
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    before = settings()
    with contextlib.suppress(KeyError), deterministic_mode():
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.get_float32_matmul_precision() == "highest"
        assert torch.backends.cudnn.deterministic
        assert not torch.backends.cudnn.benchmark
        assert not torch.utils.deterministic.fill_uninitialized_memory
        raise KeyError
    assert settings() == before
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.benchmark = False


def test_a_mode_that_is_off_changes_nothing():
    before = settings()
    with deterministic_mode(enabled=False):
        assert settings() == before


@pytest.mark.parametrize("value", [None, ":1024:2"])
def test_a_gpu_in_use_without_fixed_workspaces_is_refused(monkeypatch, value):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if value:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", value)
    before = settings()
    with pytest.raises(RuntimeError, match="CUBLAS_WORKSPACE_CONFIG"), deterministic_mode():
        pass
    assert settings() == before


def test_workspaces_are_fixed_before_the_gpu_is_used(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    with deterministic_mode():
        assert determinism.os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
