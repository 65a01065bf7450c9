"""The size of the house, counted: what `budget.toml` holds down.

    python -m tests.shape.budget            what there is, beside what is allowed
    python -m tests.shape.budget --lower    write down every number that has fallen

A number of `total`, `path` and `files_by_mode` may only fall; a folder may grow by what another one
gives, so `--lower` writes folders as they are while the totals hold. Code lines are lines with a
token other than a comment or a docstring, so neither blank lines nor explanations are worth
removing. A mode is counted by the files whose identifiers name it, outside `commands` and `cores`.
The path of a gradient is measured by test_budget.py: the files entered while steps are made, and
the classes that they define; it is lowered by hand.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import tomllib

from tests.support.paths import ROOT

PAGE = ROOT / "tests" / "shape" / "budget.toml"
HEAD = """# The size of the house, held by test_budget.py. A number may only fall:
# `python -m tests.shape.budget --lower` writes down what has fallen. budget.py says what counts.
"""
MODES = {
    "share": r"(?<![A-Za-z])share(?!d)|[a-z]_share(?!d)|Share(?!d)|Mover|Tuner",
    "selective": r"[Ss]elective|\bhot_|_hot\b|_hot_|Hot[A-Z]",
    "interval": r"interval(?!_seconds)",
    "coded": r"[Cc]oded|CODE_|state_dtype|moment_dtype",
    "late": r"Late[A-Z]|late_(weights|groups)|[Aa]rriv",
    "lion": r"[Ll]ion",
}
OPENERS = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.NL)
SKIPPED = (*OPENERS, tokenize.COMMENT, tokenize.ENCODING, tokenize.ENDMARKER)

FOLDERS = ("package_code", "tests_code")
"""Sections whose numbers are of one folder each."""
Numbers = dict[str, dict[str, int]]


def tokens(text: str) -> Iterator[tokenize.TokenInfo]:
    """The tokens of a module, without its docstrings."""
    before = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.STRING or before not in OPENERS:
            yield token
            if token.type not in (tokenize.COMMENT, tokenize.NL):
                before = token.type


def code_lines(text: str) -> int:
    """Lines that hold code."""
    lines: set[int] = set()
    for token in tokens(text):
        if token.type not in SKIPPED:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines)


def identifiers(text: str) -> str:
    """All names of a module, one after the other."""
    return " ".join(token.string for token in tokens(text) if token.type == tokenize.NAME)


def tracked() -> list[Path]:
    """Every file of the project."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    names = sorted(set(listed.stdout.splitlines()))
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def folder(path: Path) -> str:
    """The folder that a module is counted in: of the package two levels, of the tests one."""
    parts = path.relative_to(ROOT).parts[:-1]
    return "/".join(parts[: 3 if parts[0] == "deepspeed_ext" else 2])


def sums(amounts: Iterator[tuple[str, int]]) -> dict[str, int]:
    """Amounts of one name added up, by name."""
    found: dict[str, int] = {}
    for name, amount in amounts:
        found[name] = found.get(name, 0) + amount
    return dict(sorted(found.items()))


def words(files: list[Path], archive: bool) -> int:
    """Words of the pages of docs: of the manual itself, or of its folders (design, results)."""
    pages = [path for path in files if path.suffix == ".md" and ROOT / "docs" in path.parents]
    return sum(len(p.read_text().split()) for p in pages if (p.parent.name != "docs") == archive)


def fields() -> int:
    """Fields of the ``zenflow`` section."""
    tree = ast.parse((ROOT / "deepspeed_ext" / "config" / "fields.py").read_text())
    (section,) = (
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "ZenFlowConfig"
    )
    return sum(isinstance(node, ast.AnnAssign) for node in section.body)


@cache
def count() -> Numbers:
    """Every number, by section and name."""
    files = tracked()
    python = {path: path.read_text() for path in files if path.suffix == ".py"}
    heads = {"package": ROOT / "deepspeed_ext", "tests": ROOT / "tests"}
    inside = {
        name: {path: text for path, text in python.items() if head in path.parents}
        for name, head in heads.items()
    }
    shown = [
        identifiers(text)
        for path, text in inside["package"].items()
        if path.relative_to(heads["package"]).parts[0] not in ("commands", "cores")
    ]
    native = [path for path in files if path.suffix in (".cpp", ".h")]
    native = [path for path in native if heads["package"] in path.parents]
    stored = [path for path in files if path.suffix == ".json" and "benchmarks" in path.parts]
    return {
        "total": {
            "package_lines": sum(text.count("\n") for text in inside["package"].values()),
            "package_code": sum(map(code_lines, inside["package"].values())),
            "package_files": len(inside["package"]),
            "package_classes": sum(
                len(re.findall(r"^ *class \w", text, re.M)) for text in inside["package"].values()
            ),
            "native_lines": sum(path.read_text().count("\n") for path in native),
            "tests_lines": sum(text.count("\n") for text in inside["tests"].values()),
            "zenflow_fields": fields(),
            "manual_words": words(files, archive=False),
            "archive_words": words(files, archive=True),
            "benchmark_files": len(stored),
        },
        "files_by_mode": {
            mode: sum(bool(re.search(pattern, text)) for text in shown)
            for mode, pattern in MODES.items()
        },
        "package_code": sums((folder(p), code_lines(t)) for p, t in inside["package"].items()),
        "tests_code": sums((folder(p), code_lines(t)) for p, t in inside["tests"].items()),
    }


def classes(files: Iterable[str]) -> int:
    """How many classes some modules of the package define."""
    trees = (ast.parse((ROOT / name).read_text()) for name in files)
    return sum(isinstance(node, ast.ClassDef) for tree in trees for node in ast.walk(tree))


def allowed() -> Numbers:
    """The numbers of `budget.toml`."""
    return tomllib.loads(PAGE.read_text())


def exceeded(numbers: Numbers, limits: Numbers) -> list[str]:
    """Where a number is larger than its limit, or has none."""
    return [
        f"{section}.{name} is {number:,}, allowed {limits.get(section, {}).get(name, 0):,}"
        for section, found in numbers.items()
        for name, number in found.items()
        if number > limits.get(section, {}).get(name, 0)
    ]


def lowered(numbers: Numbers, limits: Numbers) -> Numbers:
    """The limits with every number that has fallen; folders as they are, while the totals hold."""
    fallen = {
        section: {name: min(n, found[name]) for name, n in limits[section].items() if name in found}
        for section, found in numbers.items()
    }
    holds = not exceeded({"total": numbers["total"]}, limits)
    folders = {name: found for name, found in numbers.items() if name in FOLDERS and holds}
    return {**limits, **fallen, **folders}


def written(numbers: Numbers) -> str:
    """The text of `budget.toml` for some limits."""
    sections = []
    for section, found in numbers.items():
        rows = [f'"{name}" = {number}' for name, number in found.items()]
        sections.append("\n".join([f"[{section}]", *rows]) + "\n")
    return "\n".join([HEAD, *sections])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--lower", action="store_true", help="write down what has fallen")
    lower = parser.parse_args().lower
    numbers, limits = count(), allowed()
    if lower:
        PAGE.write_text(written(lowered(numbers, limits)))
    told = exceeded(numbers, lowered(numbers, limits) if lower else limits)
    print("\n".join([str(numbers["total"]), str(numbers["files_by_mode"]), *told]))
    raise SystemExit(bool(told))


if __name__ == "__main__":
    main()
