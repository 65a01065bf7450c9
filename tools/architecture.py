"""Writes the table of folders in docs/architecture.md from the imports of the package.

    python -m tools.architecture

A folder counts without the folders in it. Its floor is one above the highest folder that it
imports, so every import runs downwards; folders that import each other in a circle have no floor
and are an error.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

__all__ = ["PAGE", "ROOT", "circles", "floors", "page", "folders"]

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "deepspeed_ext"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- begin: written by `make docs` -->", "<!-- end: written by `make docs` -->"


def module_name(path: Path) -> str:
    """``zenflow.rule`` for ``deepspeed_ext/zenflow/step/rule.py``; a package by its folder, the
    whole one ``""``."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def folder_of(module: str) -> str:
    """The folder of a module; ``""`` for the package itself, and for the modules that stand beside
    the folders."""
    return module if (PACKAGE / module.replace(".", "/")).is_dir() else module.rpartition(".")[0]


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file, which is parsed once in a process."""
    return tuple(ast.walk(ast.parse(path.read_text())))


@functools.cache
def imports(path: Path) -> tuple[str, ...]:
    """The modules of the package that a file imports anywhere, also inside functions and for types
    only."""
    return tuple(_imported(nodes(path)))


def _imported(found: Iterable[ast.AST]) -> Iterator[str]:
    for node in found:
        if isinstance(node, ast.Import):
            names = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [(node.module, alias.name) for alias in node.names]
        else:
            continue
        for module, name in names:
            if module.partition(".")[0] == PACKAGE.name:
                inner = ".".join(filter(None, [module.partition(".")[2], name]))
                is_module = (PACKAGE / f"{inner.replace('.', '/')}.py").exists()
                is_package = (PACKAGE / inner.replace(".", "/") / "__init__.py").exists()
                yield inner if inner and (is_module or is_package) else module.partition(".")[2]


def folders() -> dict[str, set[str]]:
    """Every folder and the other folders that it imports."""
    found: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        folder = folder_of(module_name(path))
        found.setdefault(folder, set()).update(folder_of(module) for module in imports(path))
    return {
        folder: {other for other in others if other not in ("", folder)}
        for folder, others in found.items()
        if folder
    }


def modules() -> dict[str, set[str]]:
    """Every module and the other modules that it imports, other than the package itself, whose
    public functions import theirs when they are called."""
    paths = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
    return {name: set(imports(path)) - {name, ""} for name, path in paths.items() if name}


def floors(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The folders by floor, the ground floor first; folders in a circle, and those above them, are
    on none."""
    left, built = {folder: set(others) for folder, others in graph.items()}, []
    while ready := sorted(folder for folder, others in left.items() if not others):
        built.append(ready)
        left = {
            folder: others - set(ready) for folder, others in left.items() if folder not in ready
        }
    return built


def circles(graph: Mapping[str, set[str]]) -> list[str]:
    """Folders or modules that import each other, directly or through others."""

    def reached(folder: str) -> set[str]:
        seen: set[str] = set()
        ahead = list(graph[folder])
        while ahead:
            if (other := ahead.pop()) not in seen:
                seen.add(other)
                ahead += graph[other]
        return seen

    return sorted(folder for folder in graph if folder in reached(folder))


def summary(folder: str) -> str:
    """The first sentence of a folder's docstring."""
    path = PACKAGE / folder.replace(".", "/")
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = " ".join(
        (ast.get_docstring(ast.parse(source.read_text())) or "").split("\n\n")[0].split()
    )
    return text.split(". ")[0].rstrip(".").replace(" | ", ", ").replace("|", r"\|")


def table() -> str:
    """The folders by floor, the top one first, as Markdown."""
    graph = folders()
    lines = ["| floor | folder | what it holds |", "| --- | --- | --- |"]
    for number, floor in reversed(list(enumerate(floors(graph)))):
        lines += [f"| {number} | `{folder}` | {summary(folder)} |" for folder in floor]
    return "\n".join(lines)


def page() -> str:
    """The page with a current table."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page())
