"""What a rank can do, and its neighbours: one host, peer access, NVLink, what torch has."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import itertools
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# NVML's index for NVLink in a question about two devices, and its answer for yes.
_NVML_NVLINK = 2
_NVML_OK = 0
_NVML_UNKNOWN = 6


@dataclass(frozen=True)
class Ability:
    """What one rank says of itself.

    Attributes:
        host: The machine, as long as it is up.
        device: The GPU's UUID.
        reach: UUIDs of the GPUs that this process sees and its GPU can read and write directly.
        seen: UUIDs of the GPUs that this process sees.
        linked: UUIDs of the GPUs joined to its own by NVLink; None if NVML does not tell.
        problems: What this rank lacks, in words.
    """

    host: str
    device: str
    reach: tuple[str, ...]
    seen: tuple[str, ...]
    linked: tuple[str, ...] | None
    problems: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return it as what JSON holds."""
        return asdict(self)

    @classmethod
    def from_json(cls, facts: dict[str, Any]) -> Ability:
        """Return what `to_json` was called on."""
        kept: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in facts.items()
        }
        return cls(**kept)


def serves_cuda(group: dist.ProcessGroup) -> bool:
    """Whether the group was made for CUDA tensors; simulated and MPI ranks are not."""
    if not torch.cuda.is_available():
        return False
    try:
        return any(device.type == "cuda" for device in group._device_types)
    except (AttributeError, RuntimeError, NotImplementedError):
        return False


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Return this rank's GPU: the one that the group is bound to, else the current one."""
    with contextlib.suppress(AttributeError, RuntimeError):
        bound = group.bound_device_id
        if isinstance(bound, torch.device) and bound.type == "cuda" and bound.index is not None:
            return bound
    return torch.device("cuda", torch.cuda.current_device())


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """Return the timeout that the group was made with; ten minutes where it does not tell."""
    with contextlib.suppress(AttributeError, RuntimeError, TypeError):
        timeout = group._get_backend(device).options._timeout
        if isinstance(timeout, timedelta):
            return timeout
    return timedelta(minutes=10)


def examine_rank(device: torch.device) -> Ability:
    """Say what this process can do with its GPU; nothing is allocated."""
    uuids = [_uuid(index) for index in range(torch.cuda.device_count())]
    own = device.index
    reach = [
        uuid
        for index, uuid in enumerate(uuids)
        if index != own and torch.cuda.can_device_access_peer(own, index)
    ]
    return Ability(
        host=host_name(),
        device=uuids[own],
        reach=tuple(reach),
        seen=tuple(uuids),
        linked=nvlink_neighbours(uuids[own]),
        problems=tuple(_software_problems(device)),
    )


def obstacles_between(abilities: Sequence[Ability], *, strict: bool) -> list[str]:
    """Say why ranks cannot write into one another's memory; empty if they can.

    Args:
        abilities: What each rank says of itself, in rank order.
        strict: Whether links that nobody can tell anything about are an obstacle.
    """
    found = [f"rank {r}: {text}" for r, a in enumerate(abilities) for text in a.problems]
    if len({ability.host for ability in abilities}) > 1:
        return [*found, "the ranks run on more than one host"]
    for (one, a), (other, b) in itertools.combinations(enumerate(abilities), 2):
        if a.problems or b.problems:
            continue  # said already, and what joins their GPUs may not be known
        if a.device == b.device:
            found.append(
                f"ranks {one} and {other} share one GPU (unless they do: call "
                "torch.cuda.set_device(...) on each rank before this)"
            )
            continue
        for (rank, mine), (peer, theirs) in (((one, a), (other, b)), ((other, b), (one, a))):
            obstacle = _obstacle(mine, theirs, strict=strict)
            if obstacle:
                found.append(f"between ranks {rank} and {peer}: {obstacle}")
                break
    return found


def _obstacle(mine: Ability, theirs: Ability, *, strict: bool) -> str:
    if mine.linked is not None and theirs.device not in mine.linked:
        return "no NVLink joins their GPUs"
    if theirs.device in mine.seen and theirs.device not in mine.reach:
        return "CUDA gives their GPUs no access to each other's memory"
    if mine.linked is None and theirs.device not in mine.seen:
        return "neither CUDA nor NVML tells how their GPUs are joined"
    if mine.linked is None and strict:
        return "NVML does not tell whether NVLink joins their GPUs (ask for 'symm_mem' by name)"
    return ""


def _software_problems(device: torch.device) -> list[str]:
    problems = []
    if torch.version.cuda is None:
        problems.append("this torch is not built for CUDA")
    if importlib.util.find_spec("triton") is None:
        problems.append("triton is not installed; pip install 'ulysses-comm[triton]'")
    try:
        from torch.distributed import _symmetric_memory
    except ImportError as error:
        return [*problems, f"torch {torch.__version__} has no symmetric memory ({error})"]
    if not hasattr(_symmetric_memory, "rendezvous"):
        return [*problems, f"torch {torch.__version__} has no symmetric memory"]
    backend = "CUDA"
    with contextlib.suppress(AttributeError, RuntimeError):
        backend = _symmetric_memory.get_backend(device) or backend
    if backend != "CUDA":
        problems.append(f"torch's symmetric memory is set to the backend {backend}: expected CUDA")
    return problems


def nvlink_neighbours(uuid: str) -> tuple[str, ...] | None:
    """Return UUIDs of the machine's GPUs that NVLink joins to one; None if NVML does not tell."""
    nvml = _nvml()
    if nvml is None:
        return None
    count = ctypes.c_uint()
    own = ctypes.c_void_p()
    if (
        nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(own)) != _NVML_OK
        or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != _NVML_OK
    ):
        return None
    joined = []
    for index in range(count.value):
        other, status = ctypes.c_void_p(), ctypes.c_int(-1)
        name = ctypes.create_string_buffer(96)
        if (
            nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(other)) != _NVML_OK
            or nvml.nvmlDeviceGetUUID(other, name, len(name)) != _NVML_OK
        ):
            return None
        if name.value.decode() == uuid:
            continue
        asked = nvml.nvmlDeviceGetP2PStatus(own, other, _NVML_NVLINK, ctypes.byref(status))
        if asked != _NVML_OK or status.value == _NVML_UNKNOWN:
            return None
        if status.value == _NVML_OK:
            joined.append(name.value.decode())
    return tuple(joined)


@functools.cache
def _nvml() -> ctypes.CDLL | None:
    """Return NVIDIA's management library, started; None where there is none."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        return library if library.nvmlInit_v2() == _NVML_OK else None
    except (OSError, AttributeError):
        return None


def _uuid(index: int) -> str:
    uuid = str(torch.cuda.get_device_properties(index).uuid)
    return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"


def host_name() -> str:
    """Name this machine so that no other has the name, whatever they are called."""
    boot = ""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{socket.gethostname()}/{boot}"
