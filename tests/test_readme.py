"""What the documents say: their Python runs, their commands exist, their links lead somewhere."""

from __future__ import annotations

import os
import re
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


def test_readme_snippet_is_short() -> None:
    (snippet,) = code_blocks("README.md", "python")
    assert len(snippet.splitlines()) < 20


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_of_a_document_runs_verbatim(document: str) -> None:
    blocks = code_blocks(document, "python")
    if document in ("README.md", "docs/layouts.md"):
        assert blocks, "the snippet that users read first is gone"
    for block in blocks:
        exec(compile(block, document, "exec"), {"__name__": "document"})


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
def test_example_runs_as_a_script(name: str) -> None:
    run_script([sys.executable, f"examples/{name}"])


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
