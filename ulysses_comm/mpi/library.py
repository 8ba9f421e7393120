"""The way to mpi4py, which is optional and which starts MPI when it is imported."""

from __future__ import annotations

from types import ModuleType


def load_mpi() -> ModuleType:
    """Import `mpi4py.MPI`, which starts MPI in this process, and return it.

    Raises:
        RuntimeError: If mpi4py is not installed, or finds no MPI library.
    """
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise RuntimeError(
            f"mpi4py does not import ({error}). Install it: pip install 'ulysses-comm[mpi]'. "
            "It also needs an MPI library, such as the system's Open MPI or pip install mpich."
        ) from error
    # With no library to load mpi4py raises RuntimeError, not ImportError.
    except RuntimeError as error:
        raise RuntimeError(
            f"mpi4py is installed but cannot start an MPI library ({error}). Install one, such as "
            "the system's Open MPI or pip install mpich, or name it: MPI4PY_LIBMPI=/path/libmpi.so."
        ) from error
    return MPI
