"""Fixtures that every test of the repository shares."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

# One thread for each process, here and in every process that a test starts: ranks and workers
# outnumber the cores, and what torch's attention rounds depends on how threads share its heads.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # a run of the tests that need no hypothesis
    pass
else:
    # No deadline: a case that shares its core with other tests may take any time.
    settings.register_profile(
        "repository",
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    settings.load_profile("repository")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the long sweeps out unless `-m` mentions them, and GPU tests where there is none."""
    asked = config.getoption("-m") or ""
    without_gpu = pytest.mark.skip(reason="needs a CUDA GPU; torch.cuda.is_available() is False")
    kept, left_out = [], []
    for item in items:
        if item.get_closest_marker("long") and "long" not in asked:
            left_out.append(item)
            continue
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(without_gpu)
        kept.append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Start every test from the same random state."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nan_filled_empty() -> Iterator[None]:
    """Let `torch.empty` give NaN (integers: their maximum), so that unwritten elements show.

    A module whose tests count kernels or compile overrides this fixture with an empty one of the
    same name: the fill is a kernel too.
    """
    from tests.ranks import fill_empty_with_nan

    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    fill_empty_with_nan()
    yield
    torch.use_deterministic_algorithms(before, warn_only=warn_only)
    torch.utils.deterministic.fill_uninitialized_memory = filled
