"""Which test runs which lines of the package, and how long it takes; kept, and made again for what
has changed."""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.mutations.mutants import Mutant
from tests.mutations.rooms import Room, Run
from tests.support.paths import ROOT

__all__ = ["MOST_SECONDS", "Record", "Test", "choose"]

FOLDERS = (
    "adapter",
    "checkpoint",
    "commands",
    "config",
    "cores",
    "faults",
    "flatten",
    "gather",
    "runtime",
    "zenflow",
)
"""Of tests/unit: those whose tests may kill a mutant."""
LEFT_OUT = ("test_accelerate.py", "test_upstream_configs.py")
"""Minutes of whole trainings, of lines that others run too."""
MOST_SECONDS = 25.0
"""Of the recorded time of the tests that one mutant gets: so much without ranks, and as much
with."""
STARTS_WORKER = "zenflow/step/link.py"


@dataclass(frozen=True)
class Test:
    """A test of the default suite.

    Attributes:
        name: as pytest names it.
        lines: of each file of the package, those that it runs after the import.
    """

    name: str
    seconds: float
    has_ranks: bool
    lines: dict[str, frozenset[int]] = field(repr=False)

    __test__ = False


class Record:
    """The tests of every file of `FOLDERS`, by file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # digests of the files that are being recorded, which may change meanwhile
        self._copied: dict[str, str] = {}
        self._kept: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        if self._kept.get("package") != _digest((ROOT / "deepspeed_ext").rglob("*.py")):
            self._kept = {"package": _digest((ROOT / "deepspeed_ext").rglob("*.py")), "files": {}}

    def missing(self) -> list[str]:
        """The files whose tests are not recorded as they are now."""
        kept = self._kept["files"]
        return [
            name for name in _files() if kept.get(name, {}).get("digest") != _digest([ROOT / name])
        ]

    def start(self, name: str, room: Room, folder: Path) -> Run:
        """Begin to record a file, in an empty folder."""
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._copied[name] = _digest([room.path / name])
        return room.start([name, "--timeout", "600"], lines=folder)

    def add(self, name: str, folder: Path) -> int:
        """Keep what a run has recorded of a file; return how many of its tests have passed."""
        tests: dict[str, dict[str, Any]] = {}
        for path in sorted(folder.iterdir()):
            part = json.loads(path.read_text())
            test = tests.setdefault(part["test"], {"lines": {}})
            test |= {key: value for key, value in part.items() if key in ("seconds", "has_ranks")}
            for file, lines in part["lines"].items():
                test["lines"][file] = sorted({*test["lines"].get(file, []), *lines})
        passed = {test: found for test, found in tests.items() if "seconds" in found}
        self._kept["files"][name] = {"digest": self._copied[name], "tests": passed}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._kept))
        return len(passed)

    def tests(self) -> list[Test]:
        """All tests that passed."""
        return [
            Test(
                name,
                test["seconds"],
                test["has_ranks"],
                {path: frozenset(lines) for path, lines in test["lines"].items()},
            )
            for file in self._kept["files"].values()
            for name, test in file["tests"].items()
        ]


def choose(mutant: Mutant, tests: Iterable[Test], most_seconds: float = MOST_SECONDS) -> list[Test]:
    """The tests that run the changed statement, in the order in which they run.

    Those without ranks come first, quick ones before others; then those with ranks, near ones and
    one case of each function before others; of either no more than `most_seconds`. What a module
    does when it is imported concerns all tests that enter it. What no recorded process runs is
    perhaps run by the optimizer process or a program, so all tests nearby are tried. A test that
    runs nothing of the package reads its source: it concerns every module.
    """
    path, folder = mutant.site.path, str(Path(mutant.site.path).parent)
    changed = frozenset(mutant.lines) if _is_in_function(mutant) else None
    tests = list(tests)
    reached = [
        test
        for test in tests
        if path in test.lines and (changed is None or not changed.isdisjoint(test.lines[path]))
    ]
    nearby = [
        test for test in tests if f"tests/unit/{folder}" in test.name or STARTS_WORKER in test.lines
    ]
    readers = [test for test in tests if not test.lines]
    found = sorted(
        [*(reached or nearby), *readers],
        key=lambda test: (f"tests/unit/{folder}" not in test.name, test.seconds),
    )
    quick = sorted((test for test in found if not test.has_ranks), key=lambda test: test.seconds)
    with_ranks = _one_of_each_first([test for test in found if test.has_ranks])
    return [*_within(quick, most_seconds), *_within(with_ranks, most_seconds)]


def _one_of_each_first(tests: Iterable[Test]) -> list[Test]:
    """One case of each function before the second of any."""
    seen: Counter[str] = Counter()
    turns = []
    for test in tests:
        function = test.name.partition("[")[0]
        turns.append((seen[function], test))
        seen[function] += 1
    return [test for _, test in sorted(turns, key=lambda turn: turn[0])]


def _within(tests: Iterable[Test], most_seconds: float) -> Iterator[Test]:
    spent = 0.0
    for test in tests:
        if spent == 0 or spent + test.seconds <= most_seconds:
            spent += test.seconds
            yield test


def _is_in_function(mutant: Mutant) -> bool:
    line = mutant.site.start[0]
    return any(
        node.body[0].lineno <= line <= (node.end_lineno or 0)
        for node in ast.walk(ast.parse(mutant.original))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def _files() -> list[str]:
    unit = ROOT / "tests" / "unit"
    found = [path for folder in FOLDERS for path in sorted((unit / folder).rglob("test_*.py"))]
    return [str(path.relative_to(ROOT)) for path in found if path.name not in LEFT_OUT]


def _digest(paths: Iterable[Path]) -> str:
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sorted(paths))).hexdigest()
