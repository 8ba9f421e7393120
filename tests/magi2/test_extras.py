"""Optional packages: missed only when they are used, and then by name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from magi2 import extras

_IMPORTS = """
import importlib, pkgutil, sys
import magi2.encoders, magi2.decoders, magi2.media
for package in (magi2.encoders, magi2.decoders, magi2.media):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
optional = {"av", "diffusers", "matplotlib", "PIL", "scipy", "tokenizers", "transformers"}
print(sorted(optional & set(sys.modules)))
"""


def test_importing_brings_in_no_optional_package():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _IMPORTS], capture_output=True, text=True, check=True
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_a_missing_package_is_named_with_its_extra():
    with pytest.raises(
        ModuleNotFoundError, match=r"drawing needs pillowy: pip install 'ulysses-comm\[pipeline\]'"
    ):
        extras.require("no_such_package.part", "drawing", "pillowy")


def test_what_a_present_package_misses_is_not_blamed_on_it(tmp_path, monkeypatch):
    (tmp_path / "present_package.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="'no_such_package'"):
        extras.require("present_package", "drawing")
    (tmp_path / "present_package.py").write_text("")
    assert extras.require("json", "reading").loads("1") == 1
