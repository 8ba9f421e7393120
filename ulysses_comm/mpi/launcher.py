"""Which mpirun is there, and the command line with which it starts ranks on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["mpich", "openmpi", "other"]


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """An mpirun and its family, which decides the flags that it takes."""

    path: str
    kind: Kind
    version: str  # the line that names it

    def command(self, num_ranks: int, arguments: Sequence[str]) -> list[str]:
        """Return the command that starts `arguments` on `num_ranks` ranks of this machine.

        Open MPI refuses more ranks than cores, and root, unless told otherwise; MPICH does not know
        those flags.
        """
        flags = []
        if self.kind == "openmpi":
            flags.append("--oversubscribe")
            if hasattr(os, "geteuid") and os.geteuid() == 0:
                flags.append("--allow-run-as-root")
        return [self.path, *flags, "-n", str(num_ranks), *arguments]


def find_launcher() -> Launcher | None:
    """Return the mpirun beside this Python, else the one on the PATH, or None.

    The one beside Python comes first, for it belongs to an MPI that was installed with pip, which
    mpi4py prefers too; ranks started by the mpirun of another MPI each believe to be alone.
    """
    beside = str(Path(sys.executable).parent)
    for name in ("mpirun", "mpiexec"):
        path = shutil.which(name, path=beside) or shutil.which(name)
        if path is not None:
            return _identify(path)
    return None


def _identify(path: str) -> Launcher:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Launcher(path=path, kind="other", version=f"{path} --version failed: {error}")
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    text = "\n".join(lines)
    if "Open MPI" in text or "OpenRTE" in text or "PRTE" in text:
        return Launcher(path=path, kind="openmpi", version=lines[0])
    if "HYDRA" in text or "MPICH" in text:
        number = next((line for line in lines if line.startswith("Version:")), "Version: ?")
        return Launcher(path=path, kind="mpich", version=f"MPICH (Hydra) {number.split()[-1]}")
    return Launcher(path=path, kind="other", version=lines[0] if lines else "says nothing")
