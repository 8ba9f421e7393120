"""Copy head shards into a send buffer: the plain form, and the choice of the Triton one."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Sequence
from typing import Literal

import torch

from ulysses_comm.hardware import ACCELERATORS

__all__ = ["copy_head_shards", "copy_head_shards_torch", "explain_copy"]

Backend = Literal["auto", "torch", "triton"]

_WIDENED = (torch.bfloat16, torch.float16)


def copy_head_shards_torch(
    destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
) -> None:
    """Reference: one `copy_` per pair, which converts where the dtypes differ."""
    for destination, source in zip(destinations, sources, strict=True):
        destination.copy_(source)


def copy_head_shards(
    destinations: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    *,
    backend: Backend = "auto",
) -> None:
    """Copy each source into its destination: on a GPU all of them in one kernel launch.

    Args:
        destinations: `[S, W, H_i, D_i]` each, usually the views of one send buffer. Any strides;
            fastest where the elements of one token and rank are adjacent. They must not overlap
            one another or a source.
        sources: As many tensors of the same shapes, any strides, any dtype. Equal dtypes move bit
            by bit (NaN payloads, -0.0, subnormals); others convert as `Tensor.copy_` does.
        backend: "torch" copies pair by pair, "triton" launches one kernel for up to four pairs or
            says why it can't, "auto" takes Triton where it can. `explain_copy` tells which.

    Raises:
        ValueError: If the pairs do not match in number, shape, `S` or `W`.
        RuntimeError: If `backend` is "triton" and Triton can't do this copy.

    Every element is read once and written once. Zero tokens launch nothing.
    """
    _check_pairs(destinations, sources)
    if backend == "torch":
        return copy_head_shards_torch(destinations, sources)
    if backend not in ("auto", "triton"):
        raise ValueError(f"backend={backend!r}: expected 'auto', 'torch' or 'triton'.")
    # Nothing to move: no kernel, on any backend.
    if not any(destination.numel() for destination in destinations):
        return None
    obstacle = _triton_obstacle(destinations, sources, explicit=backend == "triton")
    if obstacle is None:
        from ulysses_comm.kernels.copies import copy_head_shards_triton

        return copy_head_shards_triton(destinations, sources)
    if backend == "triton":
        raise RuntimeError(f"backend='triton' can't copy these head shards: {obstacle}.")
    return copy_head_shards_torch(destinations, sources)


def explain_copy(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> str:
    """Say which form `copy_head_shards(..., backend="auto")` takes for this copy, and why."""
    _check_pairs(destinations, sources)
    if not any(destination.numel() for destination in destinations):
        return "nothing: there is no element to copy"
    obstacle = _triton_obstacle(destinations, sources, explicit=False)
    if obstacle is not None:
        return f"torch, one copy per pair: {obstacle}"
    from ulysses_comm.kernels.copies import describe_launches

    return f"triton, {describe_launches(destinations, sources)}"


def _check_pairs(destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    if len(destinations) != len(sources):
        raise ValueError(
            f"{len(destinations)} destinations for {len(sources)} sources: expected one each."
        )
    for i, (destination, source) in enumerate(zip(destinations, sources, strict=True)):
        shape = destination.shape
        if shape != source.shape or len(shape) != 4 or shape[:2] != destinations[0].shape[:2]:
            raise ValueError(
                f"destinations[{i}] is {list(shape)} and sources[{i}] is {list(source.shape)}: "
                "expected [S, W, H_i, D_i] for both, with the same S and W in every pair. "
                "View a [S, W * H_i, D_i] source with source.unflatten(1, (W, H_i))."
            )


def _triton_obstacle(
    destinations: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], *, explicit: bool
) -> str | None:
    """Why Triton can't do this copy, or None if it can.

    `explicit` is set where the caller insists on Triton: only then does the interpreter, which is
    a debugging aid, count for CPU tensors.
    """
    if torch.compiler.is_compiling():
        return "the call is traced by torch.compile, which fuses plain copies"
    device = destinations[0].device
    if not (device.type in ACCELERATORS or (explicit and device.type == "cpu" and _interpreted())):
        return f"the tensors are on {device}, and Triton serves {' and '.join(ACCELERATORS)}"
    grad = torch.is_grad_enabled()
    for destination, source in zip(destinations, sources, strict=True):
        if source.device != device or destination.device != device:
            return f"tensors are on {device}, {source.device} and {destination.device}"
        obstacle = _pair_obstacle(destination, source)
        if obstacle is not None:
            return obstacle
        if grad and (source.requires_grad or destination.requires_grad):
            return "autograd tracks an input, and only the torch form has a gradient"
    return _missing_triton()


def _pair_obstacle(destination: torch.Tensor, source: torch.Tensor) -> str | None:
    for tensor in (destination, source):
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            return f"{type(tensor).__name__} is a tensor subclass, which may hold no memory"
    if 0 in destination.stride() and destination.numel():
        return "a destination's elements overlap"
    from_dtype, to_dtype = source.dtype, destination.dtype
    if from_dtype == to_dtype:
        return f"{to_dtype} may carry a lazy conjugate" if to_dtype.is_complex else None
    if from_dtype in _WIDENED and to_dtype == torch.float32:
        return None
    return f"the kernel converts bfloat16 and float16 to float32, not {from_dtype} to {to_dtype}"


@functools.cache
def _missing_triton() -> str | None:
    """Why Triton does not import here, or None."""
    try:
        importlib.import_module("triton")
    except ImportError as error:
        return f"triton does not import ({error}); pip install 'ulysses-comm[triton]'"
    return None


def _interpreted() -> bool:
    """Whether kernels defined from now on run under Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")
