"""Writes the line numbers of docs/design/reading.md, the walk through the code.

    python -m tools.reading

Each link of the page names something in a file of the package, such as `StepDriver.take` in
step.py; the tool finds the line on which that begins.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

__all__ = ["PAGE", "files", "line_of", "written"]

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "design" / "reading.md"
LINK = re.compile(r"\[`([\w.]+)`\]\(\.\./\.\./([\w/]+\.py)(?:#L\d+)?\)")


def line_of(path: str, name: str) -> int:
    """The line on which `name`, of a class, function or method, begins.

    Raises:
        LookupError: the file has nothing of that name.
    """
    body: list[ast.stmt] = ast.parse((ROOT / path).read_text()).body
    line = 0
    for part in name.split("."):
        found = [
            node
            for node in body
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part
        ]
        if not found:
            raise LookupError(f"{path} has no {name}, which {PAGE.relative_to(ROOT)} names")
        line, body = found[-1].lineno, found[-1].body
    return line


def written(text: str) -> str:
    """`text` with the line of every link as it is now."""
    return LINK.sub(
        lambda link: f"[`{link[1]}`](../../{link[2]}#L{line_of(link[2], link[1])})", text
    )


def files(text: str) -> list[str]:
    """The files of the package that `text` links to, in order."""
    return list(dict.fromkeys(path for _, path in LINK.findall(text)))


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
