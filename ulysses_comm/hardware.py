"""Which device, backend and layouts fit this machine: the one place that knows platforms apart.

Nothing here runs on import; each function looks when it is asked.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

DeviceKind = Literal["cpu", "cuda", "musa"]
"""Kinds of device that the packages know; "cuda" is also what AMD's torch calls its GPUs."""

ACCELERATORS = ("cuda", "musa")
"""The kinds that have streams and Triton. Compare with this, never with "cuda" alone."""

DEVICE_VARIABLE = "ULYSSES_COMM_DEVICE"
"""Environment variable that decides the kind of device: cpu, cuda or musa."""

TORCHADA_VARIABLE = "ULYSSES_COMM_TORCHADA"
"""Environment variable: 1 asks for torchada on any machine, 0 forbids it on a MUSA machine."""

_VISIBLE_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "MUSA_VISIBLE_DEVICES")

# Backends that carry tensors of one kind of device only.
_CARRIED = {"nccl": "cuda", "mccl": "musa", "ulysses_mpi": "cpu"}


@dataclass(frozen=True)
class Choice:
    """Something chosen for this machine, and why."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class LayoutDefaults:
    """Which layouts a model uses around the exchanges when nobody says; the same bits either way.

    Attributes:
        head_shard_inputs: Store queries, keys and values as head shards of one send buffer. Costs
            the copy that the exchange would make, and none once a compiler stores in place.
        head_shard_output: Read the attention output as the head shards that were received, which
            saves a copy.
    """

    head_shard_inputs: bool
    head_shard_output: bool


def is_accelerator(device: torch.device | str) -> bool:
    """Whether the device is a GPU of a kind that the packages know."""
    return _device_type(device) in ACCELERATORS


def is_musa_build() -> bool:
    """Whether this torch has Moore Threads support, a GPU or not. Imports nothing.

    `import torch` has loaded torch_musa already, unless TORCH_DEVICE_BACKEND_AUTOLOAD=0 said not
    to; then the program has to import torch_musa itself.
    """
    return getattr(torch.version, "musa", None) is not None or hasattr(torch, "musa")


def device_count(kind: DeviceKind) -> int:
    """Return how many devices of this kind the process sees; 1 for the CPU."""
    if kind == "cpu":
        return 1
    if kind == "musa" and not is_musa_build():
        return 0
    module = _device_module(kind)
    return int(module.device_count()) if module.is_available() else 0


def choose_device(kind: str | None = None) -> Choice:
    """Choose the kind of device: the argument, else the environment, else musa, cuda, cpu.

    Args:
        kind: "cpu", "cuda" or "musa"; None asks ULYSSES_COMM_DEVICE and then the machine.

    Raises:
        ValueError: If the kind is none of these.
        RuntimeError: If it was asked for and this machine has no such device.
    """
    asked = kind or os.environ.get(DEVICE_VARIABLE)
    if asked:
        source = "the caller" if kind else f"{DEVICE_VARIABLE} in the environment"
        _check_device(asked, source)
        return Choice(asked, f"{source} asked for it")
    accelerator: DeviceKind
    for accelerator in ("musa", "cuda"):
        count = device_count(accelerator)
        if count:
            return Choice(accelerator, f"torch sees {count} {accelerator} device(s)")
    return Choice("cpu", f"torch sees no accelerator: {_why_no_accelerator()}")


def device_for_rank(local_rank: int, kind: str | None = None) -> torch.device:
    """Return the device of the rank that is number `local_rank` on its machine.

    Where a launcher lets each rank see one device, it is that one.

    Raises:
        RuntimeError: If there are fewer devices than ranks; two ranks on one device would wait for
            each other in NCCL and MCCL.
    """
    chosen = cast(DeviceKind, choose_device(kind).name)
    if chosen == "cpu":
        return torch.device("cpu")
    count = device_count(chosen)
    if count == 1 and any(os.environ.get(name) for name in _VISIBLE_DEVICES):
        return torch.device(chosen, 0)
    if local_rank >= count:
        raise RuntimeError(
            f"rank {local_rank} of this machine needs a {chosen} device of its own, and torch sees "
            f"{count}. Start at most {count} rank(s) here, or set {DEVICE_VARIABLE}=cpu."
        )
    return torch.device(chosen, local_rank)


def use_device(device: torch.device) -> None:
    """Make a GPU the current one of this process; nothing to do for the CPU."""
    if is_accelerator(device):
        _device_module(device.type).set_device(device)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked of it."""
    if is_accelerator(device):
        _device_module(device.type).synchronize(device)


def choose_backend(kind: str, *, mpi_ranks: bool = False) -> Choice:
    """Choose the torch.distributed backend for tensors on this kind of device.

    Args:
        kind: "cpu", "cuda" or "musa".
        mpi_ranks: Whether mpirun started the ranks, so that MPI connects them already.

    Returns:
        A plain name: compound strings such as "cpu:gloo,cuda:nccl" pass torchada untranslated.
    """
    if kind == "musa":
        if "mccl" in dist.Backend.backend_list:
            return Choice("mccl", "MCCL carries tensors between Moore Threads GPUs")
        return Choice("gloo", "this torch_musa has no MCCL; gloo carries CPU tensors only")
    if kind == "cuda":
        if dist.is_nccl_available():
            return Choice("nccl", "NCCL carries tensors between CUDA GPUs")
        return Choice("gloo", "this torch has no NCCL; gloo carries them through the host")
    if mpi_ranks:
        return Choice("ulysses_mpi", "mpirun started the ranks, and MPI connects them already")
    if dist.is_gloo_available():
        return Choice("gloo", "gloo comes with torch and carries CPU tensors")
    return Choice("ulysses_mpi", "this torch has no gloo")


def backend_problems(backend: str, kind: str | None = None) -> list[str]:
    """Say why this torch cannot use a backend, with a fix each; empty if it can.

    Args:
        backend: Its name.
        kind: The kind of device whose tensors it is to carry, if that matters.
    """
    name = backend.lower()
    absent = _absent_backend(name)
    if absent is not None:
        return [absent]
    carried = _CARRIED.get(name)
    if kind is not None and carried not in (None, kind):
        return [f"backend '{name}' carries {carried} tensors, and the device is {kind}"]
    return []


def layout_defaults(device: torch.device | str) -> LayoutDefaults:
    """Return the layouts for models on this device.

    A kind of device that is not known to read the strided views well gets the flat ones.
    """
    known = _device_type(device) in ("cpu", *ACCELERATORS)
    return LayoutDefaults(head_shard_inputs=known, head_shard_output=known)


def load_torchada(device: torch.device | str | None = None) -> ModuleType | None:
    """Import torchada where it belongs, and return it.

    It lets programs written for CUDA run on Moore Threads GPUs by replacing much of torch, so it is
    imported for those, where it is installed, and nowhere else unless ULYSSES_COMM_TORCHADA=1 asks.
    Call it before binding names from torch.distributed.

    Args:
        device: What the program is to run on; None for the kind that this machine offers.

    Returns:
        The module, or None where it is not wanted, or not installed and not asked for.

    Raises:
        RuntimeError: If it was asked for and is not installed.
    """
    wish = os.environ.get(TORCHADA_VARIABLE, "")
    kind = choose_device().name if device is None else _device_type(device)
    if wish == "0" or (not wish and kind != "musa"):
        return None
    if importlib.util.find_spec("torchada") is None:
        if not wish:
            return None
        raise RuntimeError(
            f"{TORCHADA_VARIABLE}={wish} asks for torchada, which is not installed. Install it: "
            "pip install 'ulysses-comm[musa]', or unset the variable."
        )
    return importlib.import_module("torchada")


def _absent_backend(name: str) -> str | None:
    if name == "ulysses_mpi":
        return None  # registered when it is used; mpi4py then says what it lacks
    if name == "mpi":
        if dist.is_mpi_available():
            return None
        return "backend 'mpi' needs a torch built with MPI; use 'ulysses_mpi', which needs mpi4py"
    present = {"nccl": dist.is_nccl_available, "gloo": dist.is_gloo_available}
    if name in present and not present[name]():
        return f"backend '{name}' is not built into this torch {torch.__version__}"
    if name == "mccl" and name not in dist.Backend.backend_list:
        return "backend 'mccl' comes with torch_musa, which is not loaded or was built without it"
    if name not in dist.Backend.backend_list:
        known = sorted({*dist.Backend.backend_list, "ulysses_mpi"} - {"undefined", "mpi", "fake"})
        return f"backend '{name}' is unknown here: expected one of {', '.join(known)}"
    return None


def _device_type(device: torch.device | str) -> str:
    # A torch without torch_musa refuses torch.device("musa").
    return device.partition(":")[0] if isinstance(device, str) else device.type


def _device_module(kind: str) -> Any:
    return getattr(torch, kind)


def _check_device(kind: str, source: str) -> None:
    if kind not in ("cpu", *ACCELERATORS):
        raise ValueError(f"{source} asked for device {kind!r}: expected cpu, cuda or musa.")
    if not device_count(cast(DeviceKind, kind)):
        fix = "" if kind == "cuda" or is_musa_build() else " It needs the vendor's torch_musa."
        raise RuntimeError(
            f"{source} asked for device {kind!r}, but torch {torch.__version__} sees none.{fix} "
            f"Leave the choice open, or ask for cpu."
        )


def _why_no_accelerator() -> str:
    if is_musa_build():
        return "torch_musa is loaded but finds no GPU"
    if torch.version.cuda or torch.version.hip:
        return f"torch {torch.__version__} has GPU support but finds no GPU"
    return f"torch {torch.__version__} is a CPU build"
