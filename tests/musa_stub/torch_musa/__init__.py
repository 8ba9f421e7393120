"""A stand-in for torch_musa: what torch and torchada look at before any tensor is on a GPU.

Found through its entry point when it is on the path, as the real one is, so that `import torch`
loads it. STUB_MUSA_DEVICES is the number of GPUs that it pretends to have, STUB_MUSA_MCCL=0 leaves
MCCL out. MCCL is gloo under another name; no tensor can be made on its devices.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

__version__ = "2.11.0.post2"

devices_set: list[Any] = []


def is_available() -> bool:
    return device_count() > 0


def device_count() -> int:
    return int(os.environ.get("STUB_MUSA_DEVICES", "0"))


def is_initialized() -> bool:
    return False


def current_device() -> int:
    return 0


def set_device(device: Any) -> None:
    devices_set.append(torch.device(device))


def synchronize(device: Any = None) -> None:
    pass


def current_stream(device: Any = None) -> None:
    return None


def manual_seed_all(seed: int) -> None:
    pass


def get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    pass


def get_device_capability(device: Any = None) -> tuple[int, int]:
    return (3, 1)


def get_device_properties(device: Any = None) -> Any:
    raise RuntimeError("the stand-in for torch_musa has no devices with properties")


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def is_bf16_supported() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def _exchange_device(index: int) -> int:
    return -1


def _maybe_exchange_device(index: int) -> int:
    return -1


class device:  # noqa: N801  # the real one's name
    def __init__(self, device: Any = None) -> None:
        self.device = device

    def __enter__(self) -> device:
        return self

    def __exit__(self, *error: Any) -> None:
        pass


def _register_mccl() -> None:
    import torch.distributed as dist

    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    dist.Backend.register_backend("mccl", create, devices=["musa", "cpu"])


def _refuse_to_build(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("the stand-in for torch_musa has no headers to build against")


def _autoload() -> None:
    """What the entry point calls at the end of `import torch`."""
    torch.utils.rename_privateuse1_backend("musa")
    torch._register_device_module("musa", sys.modules[__name__])
    torch.version.musa = "5.2.0"
    if os.environ.get("STUB_MUSA_MCCL", "1") == "1":
        _register_mccl()
    # torchada would spend ten seconds on a compiler before it learns the same.
    import torch.utils.cpp_extension as cpp_extension

    cpp_extension.load = _refuse_to_build


from torch_musa import amp, core  # noqa: E402, F401
from torch_musa.core.stream import Event, Stream  # noqa: E402, F401
