"""Imports point one way, and importing brings nothing that only some uses need."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

import magi2

PACKAGE = Path(magi2.__file__).parent
ROOT = PACKAGE.parent
OPTIONAL = {"av", "diffusers", "matplotlib", "mpi4py", "PIL", "rich", "scipy", "transformers"}


def module_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")


def imports_of(path: Path) -> set[str]:
    """Modules of the package that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= (
                {node.module}
                if node.module != "magi2"
                else {f"magi2.{alias.name}" for alias in node.names}
            )
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.startswith("magi2.")}


def part_of(module: str) -> str:
    """The file or folder directly in the package."""
    return module.split(".")[1]


def graph() -> dict[str, set[str]]:
    """Which parts each part imports."""
    edges: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        part = part_of(module_of(path))
        edges.setdefault(part, set()).update(map(part_of, imports_of(path)))
    return {part: others - {part} for part, others in edges.items()}


def test_parts_import_one_another_one_way() -> None:
    graphlib.TopologicalSorter(graph()).prepare()  # CycleError names the parts


@pytest.mark.parametrize(
    ("parts", "known"),
    [
        (("checks", "extras", "hashes", "atomic_file", "kernels"), set()),
        (("ops",), {"kernels"}),
        (("encoders", "decoders"), {"atomic_file", "checks", "checkpoint", "decoders", "extras"}),
        (("media",), {"atomic_file", "checks", "extras"}),
        (("modules",), {"checks", "config", "ops", "options", "topology"}),
    ],
)
def test_lower_parts_know_only_what_is_below_them(parts: tuple[str, ...], known: set[str]) -> None:
    edges = graph()
    assert {part: edges[part] - known for part in parts} == {part: set() for part in parts}


def test_only_the_command_line_knows_the_pipeline_and_nobody_the_command_line() -> None:
    edges = graph()
    assert {part for part, others in edges.items() if "pipeline" in others} <= {"cli"}
    assert {part for part, others in edges.items() if "cli" in others} == {"__main__"}


def test_of_the_checkpoint_encoders_and_decoders_know_only_the_file_format() -> None:
    for folder in ("encoders", "decoders"):
        for path in (PACKAGE / folder).glob("*.py"):
            used = {name for name in imports_of(path) if part_of(name) == "checkpoint"}
            assert used <= {"magi2.checkpoint.shard_file"}, path


def test_importing_everything_brings_no_optional_package() -> None:
    names = sorted(
        module_of(path).removesuffix(".__init__")
        for path in PACKAGE.rglob("*.py")
        # Commands need their own packages, kernels Triton.
        if part_of(module_of(path)) not in ("cli", "kernels", "__main__")
    )
    program = (
        f"import importlib, os, sys\nbefore = dict(os.environ)\n"
        f"for name in {names}: importlib.import_module(name)\n"
        f"assert not {OPTIONAL} & set(sys.modules), {OPTIONAL} & set(sys.modules)\n"
        f"assert dict(os.environ) == before\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout + done.stderr == ""
