"""Device numbers."""

from typing import Any


def _get_musa_device_index(device: Any, optional: bool = False, allow_cpu: bool = False) -> int:
    return 0
