"""Files that are whole or not there: written under another name, flushed to disk, then renamed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

_PARTIAL = ".partial"
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT}


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file as a whole, so that whoever reads it finds the old bytes or the new ones.

    Args:
        path: The file; its folder exists.
        data: All of its bytes.

    Raises:
        OSError: If it cannot be written; the file is then as it was. Says so, and for a full disk
            how much room is missing.
    """
    partial = path.with_name(path.name + _PARTIAL)
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        _sync_folder(path.parent)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, _explain(error, path, len(data)), str(path)) from error
        raise


def _explain(error: OSError, path: Path, num_bytes: int) -> str:
    before = "is as it was" if path.exists() else "does not exist"
    text = f"{error.strerror or error} while writing {num_bytes} bytes; the file {before}"
    if error.errno in _NO_SPACE:
        text += f". Free at least {num_bytes} bytes there, or write to another disk"
    return text


def _sync_folder(folder: Path) -> None:
    """Make the rename itself last; where folders cannot be opened, as on Windows, it has to do."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
