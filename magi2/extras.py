"""Packages that only some uses need: imported when they are used, missed with a helpful message."""

from __future__ import annotations

import importlib
from typing import Any


def require(module: str, purpose: str, package: str | None = None) -> Any:
    """Import a module of an optional package.

    Args:
        module: Dotted name to import.
        purpose: What needs it, as the start of a sentence: "writing MP4 files".
        package: Name to install, where it is not the module's first part.

    Raises:
        ModuleNotFoundError: If the package is not installed, with the extra that brings it.
    """
    top = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != top:
            raise  # The package is there; something that it needs itself is not.
        raise ModuleNotFoundError(
            f"{purpose} needs {package or top}: pip install 'ulysses-comm[pipeline]'",
            name=error.name,
        ) from error
