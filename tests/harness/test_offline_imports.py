"""What `make test-gpu` imports before it runs a test is on a machine without network: torch is
there, the rest is carried (tools/wheels.py). One module that is not would leave pytest without any
test."""

from __future__ import annotations

import ast
import functools
import math
import re
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.paths import ROOT
from tools.wheels import RUNTIME, TESTS

OURS = ("deepspeed_ext", "tests", "tools", "examples", "studies")
THERE = ("torch", "triton")
"""The other machine has them: torch's builds for an accelerator bring Triton."""
COLLECTED = [ROOT / "tests" / "conftest.py", *sorted((ROOT / "tests" / "unit").rglob("*.py"))]


def carried(roots: Iterable[str]) -> set[str]:
    """The distributions that are there: `THERE`, `roots`, and what they need in turn."""
    found: set[str] = set()
    waiting = [Requirement(root) for root in (*THERE, *roots)]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in found:
            continue
        found.add(name)
        try:
            needs = [Requirement(text) for text in requires(name) or ()]
        except PackageNotFoundError:
            continue
        waiting += [
            need for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})
        ]
    return found


def imported_at_once(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Full names of what a module imports when it is imported, with lines: not in functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "the project has no relative imports"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imported_at_once(node)


@functools.cache
def _source(path: Path) -> tuple[tuple[int, str], ...]:
    return tuple(imported_at_once(ast.parse(path.read_text())))


def _files(name: str) -> list[Path]:
    """The files that an import of `name` executes: modules and packages of ours, and what an
    example is imported as."""
    parts, found = name.split("."), []
    for length in range(1, len(parts) + 1):
        path = ROOT.joinpath(*parts[:length])
        found += [
            each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()
        ]
    return found


@functools.cache
def _skips(path: Path) -> tuple[tuple[int, str], ...]:
    """The modules without which a file is skipped from some line on."""
    calls = re.finditer(
        r'^(?:\w+ = )?pytest\.importorskip\("(\w+)"\)', path.read_text(), re.MULTILINE
    )
    return tuple((call.string[: call.start()].count("\n") + 1, call[1]) for call in calls)


def missing(start: Iterable[Path], available: set[str]) -> list[str]:
    """The imports, of `start` and all that they import, that find nothing where only `available` is
    installed."""
    of_modules, found = packages_distributions(), []

    def is_there(module: str) -> bool:
        return bool(
            {canonicalize_name(each) for each in of_modules.get(module, [module])} & available
        )

    waiting, seen = list(start), set(start)
    while waiting:
        path = waiting.pop(0)
        end = min((line for line, module in _skips(path) if not is_there(module)), default=math.inf)
        for line, name in (each for each in _source(path) if each[0] < end):
            top = name.partition(".")[0]
            if top in OURS:
                new = [each for each in _files(name) if each not in seen]
                seen |= set(new)
                waiting += new
            elif top not in sys.stdlib_module_names and not is_there(top):
                found.append(f"{path.relative_to(ROOT)}:{line} imports {top}")
    return found


def test_tests_are_collected_with_no_more_than_torch_and_the_carried_wheels() -> None:
    found = missing(COLLECTED, carried([*RUNTIME, *TESTS]))
    assert not found, "\n".join(
        [*found, "import it in the test (pytest.importorskip), or carry it (tools/wheels.py)"]
    )
