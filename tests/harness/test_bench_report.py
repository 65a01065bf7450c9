"""What `make bench` keeps, and the page that is made from it."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.perf import cpu_parts, page, report, suite
from tests.perf.part import Part
from tests.perf.report import compare
from tests.perf.startup_process import Spans


def test_a_comparison_is_made_turn_by_turn() -> None:
    one = compare("ours", "theirs", "s", [1.0, 4.0, 9.0], [1.0, 2.0, 3.0], (1, 2), "a sleep")
    assert one.ratio == {"median": 2.0, "min": 1.0, "max": 3.0, "count": 3}
    assert (one.ours["max"], one.theirs["max"], one.threads, one.rival_threads) == (
        9.0,
        3.0,
        "1",
        "2",
    )
    assert compare("ours", "theirs", "s", [1.0], [0.0], (1, 1)).ratio is None
    with pytest.raises(ValueError):
        compare("ours", "theirs", "s", [1.0, 2.0], [1.0], (1, 1))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.98765, "0.988"), (1234.5, "1,234"), (-2.5, "-2.50"), (1e-9, "0.000000")],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert report.number(value) == text


def test_what_is_kept_has_a_line_for_each_row_and_can_be_read() -> None:
    value = {
        "rows": [{"a": 1.23456789, "b": {"median": 2.0}}, {"a": 3}],
        "settings": {"x": [1, 2]},
        "empty": {},
    }
    text = report.compact(value)
    assert json.loads(text) == {**value, "rows": [{"a": 1.23457, "b": {"median": 2.0}}, {"a": 3}]}
    assert '  {"a": 3}' in text.splitlines()


# -- the runner ------------------------------------------------------------------------------------


def measuring(name: str, statement: str) -> Part:
    """A part that runs `statement`, in which `write(...)` keeps a result."""
    setup = (
        "from tests.perf import report; write = lambda *rows: "
        "report.write('kept', {}, rows, [one]); "
    )
    setup += (
        "one = report.compare('ours', 'theirs', 's', [1.0, 3.0], [2.0, 2.0], (1, 1), 'a sleep')"
    )
    arguments = ("-n", "1", "-r", "1", "-s", setup, statement)
    return Part(name, "timeit", arguments, arguments, 60, "kept", "kept")


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUT", str(tmp_path))
    return tmp_path / "cpu.json"


def arguments(*words: str) -> Any:
    return suite.arguments().parse_args(["--on", "cpu", "--toy", "--device", "cpu", *words])


def test_a_crash_fails_after_the_rest_and_loses_no_result(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = measuring("good", "write({'a': 1})")
    bad = measuring("bad", "1 / 0")
    last = measuring("last", "pass")
    assert suite.measure([good, bad, last], arguments()) == 1
    assert "1.00 (0.500 to 1.50)  ours  theirs         s " in capsys.readouterr().out
    kept = json.loads(out.read_text())
    assert [row["state"] for row in kept["rows"]] == ["done", "failed", "done"]
    assert "ZeroDivisionError" in kept["rows"][1]["output"]
    assert kept["rows"][0]["output"] == "", "what is committed has no output but that of failures"
    assert kept["settings"]["results"]["kept"]["rows"] == [{"a": 1}]


def test_another_run_keeps_what_it_does_not_measure(out: Path) -> None:
    assert suite.measure([measuring("one", "write({'a': 1})")], arguments()) == 0
    assert suite.measure([measuring("two", "pass")], arguments()) == 0
    kept = json.loads(out.read_text())
    assert [row["part"] for row in kept["rows"]] == ["one", "two"]
    assert kept["settings"]["results"]["kept"]["rows"] == [{"a": 1}]
    assert suite.measure([measuring("one", "1 / 0")], arguments()) == 0, "it is done"
    assert suite.measure([measuring("one", "1 / 0")], arguments("--again")) == 1


def test_measurements_go_to_an_ignored_folder_unless_they_are_to_be_stored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OUT", raising=False)
    assert suite.record_of(arguments()).path == report.ROOT / "outputs" / "bench" / "cpu.json"
    assert suite.record_of(arguments("--store")).path == cpu_parts.KEPT


def test_what_has_no_meaning_is_not_stored(capsys: pytest.CaptureFixture[str]) -> None:
    assert suite.main(["--on", "cpu", "--toy", "--store"]) == 2
    assert suite.main(["--on", "gpu", "--store"]) == 2
    assert capsys.readouterr().err.count("--store") == 2


def test_a_terminal_shows_tables_in_columns() -> None:
    markdown = "before\n| part | s |\n| --- | --- |\n| long name | 1 |\n| b |  |\n\nafter"
    assert report.for_terminal(markdown).splitlines() == [
        *("before", "part       s", "---------  -", "long name  1", "b", "", "after")
    ]


def test_a_silent_part_shows_life(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("deepspeed_ext.runtime.progress.LIFE_SECONDS", 0.0)
    monkeypatch.setattr("tests.perf.part.LOOK_SECONDS", 0.01)
    assert suite.measure([measuring("quiet", "pass")], arguments()) == 0
    assert "\nquiet ... 0 s\n" in capsys.readouterr().out


def test_the_parts_fit_into_half_an_hour() -> None:
    parts = cpu_parts.parts()
    assert sum(part.usual for part in parts) < 30 * 60
    assert all(part.limit > part.usual for part in parts)
    assert {part.result for part in parts} - {""} == set(page.SECTIONS)


def test_a_phase_is_counted_without_the_phases_inside_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = iter([0.0, 1.0, 3.0, 7.0])
    monkeypatch.setattr("tests.perf.startup_process.time.perf_counter", lambda: next(now))
    spans = Spans()
    with spans.span("outer"), spans.span("inner"):
        pass
    assert spans.seconds == {"inner": 2.0, "outer": 5.0}


# -- the page --------------------------------------------------------------------------------------

KEPT = json.loads(cpu_parts.KEPT.read_text())
RESULTS = KEPT["settings"]["results"]
SIMULATED = ("offload_step", "save", "overlap", "memory_plan")


def test_the_page_is_what_the_measurements_give() -> None:
    assert page.PAGE.read_text() == page.markdown(KEPT), "run `make bench-report`"


def test_the_figures_are_those_of_the_measurements() -> None:
    drawn = {name for name in RESULTS if page.is_drawn(RESULTS[name].get("comparisons", []))}
    assert {path.name for path in page.PAGE.parent.glob("benchmarks_*.svg")} == {
        page.figure_of(name).name for name in drawn
    }
    for name in drawn:
        assert page.digest(RESULTS[name]["comparisons"]) in page.figure_of(name).read_text(), (
            "run `make bench-report`"
        )


def test_no_label_of_a_figure_comes_twice_in_a_panel() -> None:
    for name in RESULTS:
        comparisons = RESULTS[name].get("comparisons", [])
        found = page.panels(comparisons)
        assert sum(map(len, found.values())) == sum(one["ratio"] is not None for one in comparisons)
        for rows in found.values():
            labels = [label for label, _ in rows]
            assert len(labels) == len(set(labels)), name


def test_figures_have_the_titles_of_their_sections() -> None:
    for name in RESULTS:
        if page.is_drawn(RESULTS[name].get("comparisons", [])):
            assert f">{page.SECTIONS[name].title}</text>" in page.figure_of(name).read_text()


def test_the_ratio_comes_first_and_long_tables_are_folded() -> None:
    shown = re.sub(r"<details.*?</details>", "", page.PAGE.read_text(), flags=re.DOTALL)
    tables = [line for line in shown.splitlines() if line.startswith("| ")]
    assert {line for line in tables if " ratio " in line} == {"| ratio | what | compared with |"}
    assert len(tables) < 100


def test_every_part_is_on_the_page_and_none_has_failed() -> None:
    assert {row["state"] for row in KEPT["rows"]} <= {"done", "left out"}
    text = page.PAGE.read_text()
    assert all(f"| {part.name} | " in text for part in cpu_parts.parts())
    assert all(f"## {page.SECTIONS[name].title}\n" in text for name in RESULTS)


def test_simulations_are_marked() -> None:
    one = compare("a step", "another", "ms", [1.0], [2.0], (1, 1), "a sleep of 5 ms")
    kept = {
        **KEPT,
        "settings": {"results": {"save": {**RESULTS["startup"], "comparisons": [asdict(one)]}}},
    }
    summary, row = [
        line for line in page.markdown(kept).splitlines() if line.startswith("| 0.500 | ")
    ]
    assert summary == "| 0.500 | ms (simulation) | another |"
    assert row == "| 0.500 | a step | another | ms | 1.00 | 2.00 | 1 | a sleep of 5 ms |"
    simulated = {name: RESULTS[name]["comparisons"] for name in SIMULATED if name in RESULTS}
    assert [
        name for name, found in simulated.items() if not all(one["simulation"] for one in found)
    ] == []
