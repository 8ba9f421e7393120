"""Imports point one way, and importing does nothing."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import ulysses_comm

PACKAGE = Path(ulysses_comm.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))

# What `ulysses_comm` may import when it is imported itself; numpy comes with torch, and brings the
# runtime of Cython.
CORE = {"torch", "numpy", "cython_runtime", "ulysses_comm", *sys.stdlib_module_names}
# Parts that an extra of the distribution belongs to; nothing imports them unasked.
OPTIONAL = {"kernels", "demo", "mpi", "__main__.py"}

PUBLIC = [
    "LONE_RANK",
    "RankDisagreementError",
    "as_send_buffer",
    "balanced_split_sizes",
    "empty_head_shards",
    "flatten_head_shards",
    "pack_head_shards",
    "pin_head_layout",
    "scatter_heads_gather_seqlen",
    "scatter_seqlen_gather_head_shards",
    "scatter_seqlen_gather_heads",
    "simulate",
    "simulate_world",
]

# Imports the package and every public name in a process of its own, and reports what that did.
PROBE = """
import json, os, sys
import torch, torch.distributed, torch.distributed.device_mesh
before = dict(os.environ)
modules = set(sys.modules)
state = torch.get_rng_state().tolist()
import ulysses_comm
imported = set(sys.modules) - modules
names = {name: type(getattr(ulysses_comm, name)).__name__ for name in %r}
after = set(sys.modules) - modules
json.dump({
    "imported": sorted(imported),
    "after": sorted(after),
    "names": names,
    "environment": {k: v for k, v in os.environ.items() if before.get(k) != v},
    "same_rng": state == torch.get_rng_state().tolist(),
    "cuda": torch.cuda.is_initialized(),
    "initialized": torch.distributed.is_initialized(),
    "grad": torch.is_grad_enabled(),
}, open(sys.argv[1], "w"))
"""


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def imports_of(path: Path, *, top_level_only: bool) -> set[str]:
    """Return the top packages that a file imports, everywhere or only when it is imported."""
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    if top_level_only:
        deferred = {
            id(inner)
            for node in nodes
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
            for inner in ast.walk(node)
        }
        nodes = [node for node in nodes if id(node) not in deferred]
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add("ulysses_comm" if node.level else (node.module or "").partition(".")[0])
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_file_of_the_package_imports_the_model(path: Path) -> None:
    assert "magi2" not in imports_of(path, top_level_only=False)


@pytest.mark.parametrize(
    "path",
    [p for p in SOURCES if not OPTIONAL & set(p.relative_to(PACKAGE).parts)],
    ids=lambda p: str(p.relative_to(PACKAGE)),
)
def test_core_files_import_torch_and_the_standard_library_only(path: Path) -> None:
    assert imports_of(path, top_level_only=True) - CORE == set()


def test_importing_the_package_does_nothing(tmp_path: Path) -> None:
    report_file = tmp_path / "report.json"
    done = run_python(PROBE % PUBLIC, str(report_file))
    assert done.returncode == 0, done.stderr
    assert (done.stdout, done.stderr) == ("", "")
    report = json.loads(report_file.read_text())
    foreign = {
        name
        for name in report["after"]
        if name.partition(".")[0] not in CORE and not name.startswith("_")
    }
    assert foreign == set(), "an optional package is imported"
    for package in ("magi2", "triton", "matplotlib", "rich", "typer", "transformers", "torchada"):
        assert package not in report["imported"]
        assert package not in report["after"]
    assert report["environment"] == {}
    assert report["same_rng"]
    assert report["grad"]
    assert not report["cuda"]
    assert not report["initialized"]
    assert set(report["names"]) == set(PUBLIC)


@pytest.mark.parametrize(
    "code",
    [
        "import ulysses_comm.simulate; from ulysses_comm import simulate; simulate(1, lambda g: g)",
        "from ulysses_comm.simulate import Simulation; import ulysses_comm; "
        "ulysses_comm.simulate(1, lambda g: g)",
        "from ulysses_comm import simulate; from ulysses_comm.simulate import Simulation; "
        "simulate(1, lambda g: g)",
        "from ulysses_comm import *; simulate(1, lambda g: g)",
    ],
    ids=["module first", "class first", "function first", "star"],
)
def test_the_function_simulate_wins_over_its_module(code: str) -> None:
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_all_lists_what_is_public() -> None:
    assert set(PUBLIC) <= set(ulysses_comm.__all__)
    for name in ulysses_comm.__all__:
        assert hasattr(ulysses_comm, name)
    assert set(ulysses_comm.__all__) <= set(dir(ulysses_comm))
    with pytest.raises(AttributeError, match="no_such_name"):
        ulysses_comm.no_such_name  # noqa: B018
