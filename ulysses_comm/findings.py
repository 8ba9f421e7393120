"""What a machine offers, and what would be chosen there: the lines that the doctor prints."""

from __future__ import annotations

import importlib.metadata
import os
import platform

import torch
import torch.distributed as dist

from ulysses_comm import hardware
from ulysses_comm.bootstrap import Launch
from ulysses_comm.mpi import BACKEND as MPI_BACKEND
from ulysses_comm.mpi import Launcher, find_launcher
from ulysses_comm.symmetric.choice import (
    TransportChoice,
    choice_on_this_machine,
    explain_transport,
    use_transport,
)
from ulysses_comm.watchdog import explain_watchdog

# Packages that make something possible, and what; looked up, never imported.
_PACKAGES = {
    "numpy": "arrays",
    "triton": "one-launch packs on a GPU",
    "mpi4py": "ranks that mpirun starts",
    "torch_musa": "Moore Threads GPUs",
    "torchada": "CUDA programs on Moore Threads GPUs",
    "transformers": "Hugging Face models",
    "matplotlib": "pictures of traffic",
}


def facts() -> list[tuple[str, str]]:
    """Return (what, what was found) for hardware, software and the environment."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = [
        ("ulysses-comm", version("ulysses-comm") or "runs from its sources"),
        ("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        ("torch", f"{torch.__version__}, built for {_built_for()}"),
        ("CPU", f"{cores} core(s), {torch.get_num_threads()} thread(s) in torch"),
        ("CUDA GPUs", _gpus("cuda")),
        ("MUSA GPUs", _gpus("musa")),
        ("backends", _backends()),
        ("mpirun", _mpirun(find_launcher())),
    ]
    if torch.version.cuda:
        found.append(("NCCL watchdog", explain_watchdog(os.environ)))
    for package, purpose in _PACKAGES.items():
        found.append((package, version(package) or f"not installed; for {purpose}"))
    given = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith("ULYSSES")
    ]
    return [*found, ("environment", ", ".join(given) or "nothing of ulysses_comm is set")]


def version(package: str) -> str | None:
    """Return a package's version, or None if it is not installed; nothing is imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _built_for() -> str:
    if hardware.is_musa_build():
        return f"MUSA {getattr(torch.version, 'musa', None) or '(version unknown)'}"
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU"


def _gpus(kind: hardware.DeviceKind) -> str:
    count = hardware.device_count(kind)
    if not count:
        return "none"
    try:
        names = [getattr(torch, kind).get_device_name(index) for index in range(count)]
    except (AttributeError, RuntimeError) as error:
        return f"{count}, whose names torch does not tell ({error})"
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))


def _backends() -> str:
    usable = [
        name
        for name in ("gloo", "nccl", "mccl", "mpi")
        if not hardware.backend_problems(name) and name in dist.Backend.backend_list
    ]
    return ", ".join([*usable, *([MPI_BACKEND] if version("mpi4py") else [])])


def _mpirun(launcher: Launcher | None) -> str:
    return "none" if launcher is None else f"{launcher.path}, {launcher.version}"


def choices(launch: Launch | None) -> list[tuple[str, str]]:
    """Return (what, what is chosen and why); on started ranks every rank has to call this.

    Args:
        launch: How this rank was started; None for a process that nothing started.
    """
    device = hardware.choose_device()
    if launch is not None:
        backend = launch.backend
        start = f"{launch.world_size} rank(s), started by {launch.launcher}"
    else:
        backend = hardware.choose_backend(device.name)
        start = "none that torchrun or mpirun started"
    layouts = hardware.layout_defaults(device.name)
    wanted = [
        name
        for name, chosen in (
            ("inputs", layouts.head_shard_inputs),
            ("output", layouts.head_shard_output),
        )
        if chosen
    ]
    return [
        ("ranks", start),
        ("device", f"{device.name}: {device.reason}"),
        ("backend", f"{backend.name}: {backend.reason}"),
        ("transport", _transport(launch)),
        ("layouts", f"head shards for {' and '.join(wanted)}" if wanted else "flat"),
    ]


def _transport(launch: Launch | None) -> str:
    """Say what `use_transport(group, "auto")` chooses; on started ranks they all do it."""
    if launch is None:
        return _in_words(choice_on_this_machine())
    use_transport(None, "auto")
    return explain_transport(None)


def _in_words(choice: TransportChoice) -> str:
    return f"{choice.name}: {choice.reason}"
