"""The settings of torch under which a run repeats its bits, as a context.

They cover what runs eagerly. Compiled regions need the same word with each of their compiles, since
torch's switch is reset after every traced frame: `magi2.compiling` passes it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
# The two that cuBLAS documents as giving the same bits from run to run.
_FIXED_WORKSPACES = (":4096:8", ":16:8")


@contextmanager
def deterministic_mode(enabled: bool = True) -> Iterator[None]:
    """Let everything inside repeat its bits, and put torch's settings back at the end.

    Inside, only deterministic kernels run (torch raises where it has none), nothing is chosen by
    benchmark, float32 products are true float32, and sums of narrower products are kept in float32.
    Fresh memory is not filled, as torch's mode would: nothing here reads what was not written.

    On a GPU cuBLAS needs fixed workspaces, which it reads from the environment once: the variable
    is set if it is not, and stays so.

    The settings are the process's: enter it once around all simulated ranks. Repeated bits are
    meant for the same machine, the same number of threads and the same library versions.

    Args:
        enabled: False changes nothing, so that a flag can be passed through.

    Raises:
        RuntimeError: If a GPU is in use already and cuBLAS was told nothing of fixed workspaces,
            which it reads once, when it starts.
    """
    if not enabled:
        yield
        return
    _fix_workspaces()
    before = _read()
    _write((True, False, False, "highest", True, False, False, False))
    try:
        yield
    finally:
        _write(before)


def _fix_workspaces() -> None:
    if os.environ.get(_WORKSPACE) in _FIXED_WORKSPACES or not torch.cuda.is_available():
        return
    if torch.cuda.is_initialized():
        raise RuntimeError(
            f"{_WORKSPACE}={os.environ.get(_WORKSPACE)!r} and the GPU is in use: expected one of "
            f"{_FIXED_WORKSPACES} before it first is. Set it in the environment, or enter the "
            "deterministic mode before anything runs on the GPU."
        )
    os.environ[_WORKSPACE] = _FIXED_WORKSPACES[0]


_Settings = tuple[bool, bool, bool, str, bool, bool, bool, bool]


def _memory() -> Any:
    """The module, whose one property no type checker knows."""
    return torch.utils.deterministic


def _read() -> _Settings:
    matmul = torch.backends.cuda.matmul
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        _memory().fill_uninitialized_memory,
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        matmul.allow_bf16_reduced_precision_reduction,
        matmul.allow_fp16_reduced_precision_reduction,
    )


def _write(settings: _Settings) -> None:
    enabled, warn_only, fill, precision, cudnn, benchmark, bf16, fp16 = settings
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    _memory().fill_uninitialized_memory = fill
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.deterministic = cudnn
    torch.backends.cudnn.benchmark = benchmark
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = bf16
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = fp16
