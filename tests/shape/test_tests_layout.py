"""The tests' own structure: folders mirror the package, and what tests share lies in
tests/support."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.support.paths import ROOT

UNIT, SUPPORT = ROOT / "tests" / "unit", ROOT / "tests" / "support"
WITHOUT_A_PACKAGE = {"faults"}
"""Folders of tests that concern the whole package."""


def imported(path: Path) -> set[str]:
    """Full names of all modules that a file imports, and of what it imports from modules."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = (
                path.relative_to(ROOT).with_suffix("").parts[: -node.level] if node.level else ()
            )
            module = ".".join([*package, *filter(None, [node.module])])
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


def imports_that_match(folder: Path, pattern: str) -> list[str]:
    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted(folder.rglob("*.py"))
        for name in sorted(imported(path))
        if re.match(pattern, name)
    ]


def test_no_test_module_is_imported_by_another() -> None:
    assert not imports_that_match(UNIT, r"tests\.unit\.(.+\.)?test_\w+$"), (
        "what tests share belongs to tests/support"
    )


def test_support_imports_no_tests() -> None:
    assert not imports_that_match(SUPPORT, r"tests\.unit\b")


def test_every_folder_of_tests_is_that_of_a_package() -> None:
    folders = {path.parent.relative_to(UNIT) for path in UNIT.rglob("test_*.py")} - {Path()}
    packages = {
        path.parent.relative_to(ROOT / "deepspeed_ext")
        for path in ROOT.glob("deepspeed_ext/*/**/__init__.py")
    }
    assert {str(folder) for folder in folders - packages} == WITHOUT_A_PACKAGE
    assert not [folder for folder in folders if not (UNIT / folder / "__init__.py").exists()]


def test_an_import_in_any_form_is_found(tmp_path: Path, monkeypatch) -> None:
    folder = tmp_path / "tests" / "unit" / "zenflow"
    folder.mkdir(parents=True)
    lines = [
        "import tests.unit.test_a",
        "from tests.unit import test_a as a",
        "from . import test_a",
    ]
    for number, line in enumerate([*lines, "from .test_a import b"]):
        (folder / f"test_{number}.py").write_text(f"def test() -> None:\n    {line}\n")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert (
        len(
            {
                line.split()[0]
                for line in imports_that_match(folder, r"tests\.unit\.(.+\.)?test_\w+$")
            }
        )
        == 4
    )
