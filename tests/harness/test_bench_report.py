"""What `make bench` runs and keeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.perf import bench_convergence, sides, suite
from tests.perf.part import Part
from tests.support import ranks


def measuring(name: str, statement: str) -> Part:
    """A part that runs `statement`, in which `write(...)` keeps a result."""
    setup = "from tests.perf import report; report.provenance = dict; "
    setup += "write = lambda *rows: report.write('kept', {}, rows)"
    arguments = ("-n", "1", "-r", "1", "-s", setup, statement)
    return Part(name, "timeit", arguments, arguments, 60, "kept", "kept")


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUT", str(tmp_path))
    return tmp_path / "cpu.json"


def arguments(*words: str) -> Any:
    return suite.arguments().parse_args(["--on", "cpu", "--toy", "--device", "cpu", *words])


def test_another_run_keeps_what_it_does_not_measure(out: Path) -> None:
    assert suite.measure([measuring("one", "write({'a': 1})")], arguments()) == 0
    assert suite.measure([measuring("two", "pass")], arguments()) == 0
    kept = json.loads(out.read_text())
    assert [row["part"] for row in kept["rows"]] == ["one", "two"]
    assert kept["settings"]["results"]["kept"]["rows"] == [{"a": 1}]
    assert suite.measure([measuring("one", "1 / 0")], arguments()) == 0, "it is done"
    assert suite.measure([measuring("one", "1 / 0")], arguments("--again")) == 1


def test_initialize_changes_no_weight() -> None:
    changed = bench_convergence.changed_by_initialize
    assert ranks.run_ranks(1, changed, sides.PREDICTIVE, 2) == [0]
    upstream = ranks.run_ranks(1, changed, sides.UPSTREAM_SEQUENTIAL, 2)
    assert upstream != [0], "upstream has been mended: say so in docs/design/upstream.md"
