"""Writes the tables of docs/results/numerics.md between its markers."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from studies.numerics.analysis import Line, Sample, Trend, contrasts, lines, trends
from studies.numerics.rows import GROUPS, NoRateError, Row, planned, rate_of, stored
from studies.numerics.tasks import TASKS
from tests.perf import report

BEGIN, END = "<!-- begin: {} -->", "<!-- end: {} -->"
TRENDS, CONTRASTS, RATES = "trends", "contrasts", "rates"


def page() -> Path:
    """The page of the study."""
    return report.ROOT / "docs" / "results" / "numerics.md"


def _signed(value: float) -> str:
    return format(value, "+.2f")


def _interval(sample: Sample | None) -> str | None:
    if sample is None or sample.half_width is None:
        return None
    return f"{sample.mean - sample.half_width:+.2f} to {sample.mean + sample.half_width:+.2f}"


def _p(sample: Sample | None) -> float | None:
    return None if sample is None else sample.p_above_zero


def _cells(line: Line) -> dict[str, Any]:
    done = f"{line.done} of {line.wanted}" + (
        f", {line.diverged} diverged" if line.diverged else ""
    )
    return {
        "part": line.group,
        "task": line.task,
        "setting": line.setting,
        "rule": line.rule,
        "seeds": done,
        "loss": line.loss,
        "held out": line.held_out,
        "gap %": None if line.gap is None else line.gap.mean,
        "90 % interval": _interval(line.gap),
        "p": _p(line.gap),
        "held-out gap %": None if line.held_out_gap is None else line.held_out_gap.mean,
        "verdict": line.verdict,
    }


ROW_COLUMNS: dict[str, Any] = {
    "part": "",
    "task": "",
    "setting": "",
    "rule": "",
    "seeds": "",
    "loss": ".3f",
    "held out": ".3f",
    "gap %": _signed,
    "90 % interval": "",
    "p": ".3f",
    "held-out gap %": _signed,
    "verdict": "",
}


def rows_table() -> str:
    """Every line of the plan; what was not run has empty cells."""
    return report.table([_cells(line) for line in lines()], ROW_COLUMNS)


def _trend_cells(trend: Trend) -> dict[str, Any]:
    growth = trend.growth
    return {
        "what": trend.what,
        "rule": trend.rule,
        "seeds": 0 if growth is None else len(growth.values),
        "growth, points": None if growth is None else growth.mean,
        "90 % interval": _interval(growth),
        "p": _p(growth),
        "verdict": trend.verdict,
    }


def trends_table() -> str:
    """By how much the gap grows with size, steps, ranks and batch."""
    columns: dict[str, Any] = {
        "what": "",
        "rule": "",
        "seeds": "d",
        "growth, points": _signed,
        "90 % interval": "",
        "p": ".3f",
    }
    return report.table([_trend_cells(trend) for trend in trends()], {**columns, "verdict": ""})


def contrasts_table() -> str:
    """Which rule has the larger gap: H3 and H4."""
    columns: dict[str, Any] = {
        "hypothesis": "",
        "setting": "",
        "larger gap": "",
        "than": "",
        "seeds": "d",
        "points": _signed,
    }
    rows = [
        {
            "hypothesis": contrast.hypothesis,
            "setting": contrast.setting,
            "larger gap": contrast.worse,
            "than": contrast.better,
            "seeds": 0 if contrast.difference is None else len(contrast.difference.values),
            "points": None if contrast.difference is None else contrast.difference.mean,
            "90 % interval": _interval(contrast.difference),
            "verdict": contrast.verdict,
        }
        for contrast in contrasts()
    ]
    return report.table(rows, {**columns, "90 % interval": "", "verdict": ""})


def rates_table() -> str:
    """Which learning rates AdamW has chosen."""
    rows = []
    for name in dict.fromkeys(row.task for _, row in planned()):
        row = {"task": name, "candidates": ", ".join(f"{rate:g}" for rate in TASKS[name].rates)}
        with contextlib.suppress(NoRateError):
            row["chosen"] = format(rate_of(Row(name, "adamw", "base", 0)), "g")
        rows.append(row)
    return report.table(rows, {"task": "", "candidates": "", "chosen": ""})


def progress() -> str:
    """How many rows of each group are there."""
    found: dict[str, list[bool]] = {}
    for group, row in planned():
        found.setdefault(group, []).append(stored(row) is not None)
    titles = {group.name: group.title for group in GROUPS} | {
        "rates": "Learning rates, before their first use"
    }
    rows = [
        {"group": name, "title": titles[name], "rows": f"{sum(done)} of {len(done)}"}
        for name, done in found.items()
    ]
    return report.table(rows, {"group": "", "title": "", "rows": ""})


def replace_part(text: str, name: str, content: str) -> str:
    """`text` with what is between the markers of `name` replaced."""
    begin, end = BEGIN.format(name), END.format(name)
    if begin not in text or end not in text:
        raise ValueError(f"{page()} has no part between {begin} and {end}")
    before, rest = text.split(begin, 1)
    return f"{before}{begin}\n{content}\n{end}{rest.split(end, 1)[1]}"


def current() -> str:
    """The page with the tables that the stored rows give; the rows themselves are too many for a
    page, and `rows_table` is printed."""
    text = page().read_text()
    tables = {TRENDS: trends_table, CONTRASTS: contrasts_table, RATES: rates_table}
    for name, make in tables.items():
        text = replace_part(text, name, make())
    return text


def write() -> Path:
    """Write all tables into the page."""
    page().write_text(current())
    return page()
