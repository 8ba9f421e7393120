"""What the documents say: their Python runs, their commands exist, their links lead somewhere."""

from __future__ import annotations

import ast
import builtins
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = ["README.md", *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]


def code_blocks(document: str, language: str) -> list[str]:
    """Return the fenced blocks of one language, in order."""
    text = (ROOT / document).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def test_readme_snippets_are_short() -> None:
    snippets = code_blocks("README.md", "python")
    assert len(snippets) == 2
    assert all(len(snippet.splitlines()) < 22 for snippet in snippets)


def test_a_transformers_model_takes_under_ten_lines() -> None:
    """What a user adds to a training step: the body of the function in the second snippet."""
    snippet = code_blocks("README.md", "python")[1]
    (function,) = [n for n in ast.parse(snippet).body if isinstance(n, ast.FunctionDef)]
    assert len(function.body) < 10


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_of_a_document_runs_verbatim(document: str, tmp_path: Path) -> None:
    """Whole programs run, each in a process of its own; of excerpts, the imports do."""
    blocks = code_blocks(document, "python")
    whole = [block for block in blocks if not undefined_names(block)]
    if document in ("README.md", "docs/layouts.md"):
        assert blocks, "the snippet that users read first is gone"
        assert whole == blocks, "the snippet lacks a definition"
    for index, block in enumerate(blocks):
        program = tmp_path / f"block_{index}.py"
        program.write_text(block if block in whole else imports_of(block), encoding="utf-8")
        run_script([sys.executable, str(program)])


def undefined_names(block: str) -> set[str]:
    """Return the names that a block uses and defines nowhere: what makes it an excerpt."""
    nodes = list(ast.walk(ast.parse(block)))
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    defined = set(dir(builtins))
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.alias):
            defined.add(node.asname or node.name.split(".")[0])
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
    return used - defined


def imports_of(block: str) -> str:
    """Return a block's import statements."""
    statements = ast.parse(block).body
    imports = [node for node in statements if isinstance(node, ast.Import | ast.ImportFrom)]
    return "\n".join(map(ast.unparse, imports))


def test_undefined_names_tell_excerpts_from_programs() -> None:
    assert undefined_names("import a.b as c\ndef f(x): return c(x, y)\nz = f(len([]))") == {"y"}
    assert imports_of("from a import b\nb(y)") == "from a import b"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_of_a_document_lead_to_files(document: str) -> None:
    text = (ROOT / document).read_text(encoding="utf-8")
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    missing = [name for name in targets if not ((ROOT / document).parent / name).exists()]
    assert not missing


def test_make_commands_of_the_readme_exist() -> None:
    commands = re.findall(r"^make (\S+)", "".join(code_blocks("README.md", "sh")), re.MULTILINE)
    assert commands == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(re.search(rf"^{command}:", makefile, re.MULTILINE) for command in commands)


def test_ci_calls_the_test_command_of_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert re.search(r"^step make test$", script, re.MULTILINE)
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "examples").glob("*.py")))
def test_example_runs_as_its_docstring_says(name: str, tmp_path: Path) -> None:
    docstring = ast.get_docstring(ast.parse((ROOT / "examples" / name).read_text("utf-8"))) or ""
    command = re.search(rf"^python (examples/{name}.*?)(?:  .*)?$", docstring, re.MULTILINE)
    assert command, f"the docstring of {name} has no line 'python examples/{name}'"
    arguments = command[1].replace("/path/to/folder", str(tmp_path / "folder"))
    run_script([sys.executable, *shlex.split(arguments)])


@pytest.mark.gloo
def test_two_ranks_example_runs_under_torchrun() -> None:
    output = run_script(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--local-addr=127.0.0.1", "--nproc-per-node=2", "examples/two_ranks.py"),
        ]
    )
    assert all(f"Rank {rank} agrees with a single rank." in output for rank in range(2))


def run_script(command: list[str]) -> str:
    """Run a command in the repository as a user would, and return what it printed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
