"""What all benchmarks share: alternation, medians and spread, and a JSON file with its
provenance."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LOAD_AT_START = os.getloadavg()[0]
Summary = dict[str, float]
"""What `summary` returns."""


def alternate(variants: Sequence[str], repeats: int, warm_up: int = 1) -> Iterator[tuple[int, str]]:
    """A B C A B C ...; the first `warm_up` rounds carry negative numbers and are not to be
    counted."""
    for turn in range(-warm_up, repeats):
        for variant in variants:
            yield turn, variant


def summary(values: Sequence[float]) -> Summary:
    """Median, smallest and largest of `values`, and how many there were."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "count": len(values),
    }


def table(rows: Sequence[dict[str, Any]], columns: dict[str, str | Callable[[Any], str]]) -> str:
    """`rows` as a Markdown table; `columns` maps a key to a format specification or a function."""
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    for row in rows:
        cells = []
        for name, form in columns.items():
            value = row.get(name)
            cells.append(
                "" if value is None else form(value) if callable(form) else format(value, form)
            )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def shown(value: Any) -> str:
    """A cell: a summary as its median, with smallest and largest if there was more than one
    value."""
    if value is None:
        return ""
    if isinstance(value, dict):
        spread = (
            f" ({number(value['min'])} to {number(value['max'])})"
            if value["min"] != value["max"]
            else ""
        )
        return number(value["median"]) + spread
    return number(value) if isinstance(value, float) else str(value)


def number(value: float) -> str:
    """Three digits, or all digits before the point."""
    if value == 0:
        return "0"
    digits = min(6, max(0, 2 - math.floor(math.log10(abs(value)))))
    return f"{value:,.{digits}f}"


def for_terminal(text: str) -> str:
    """`text` with the cells of its Markdown tables in columns, as a terminal shows them best."""
    lines, table_lines = list[str](), list[list[str]]()
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            table_lines += [] if set(line) <= set("|- ") else [cells]
            continue
        if table_lines:
            widths = [max(map(len, column)) for column in zip_longest(*table_lines, fillvalue="")]
            table_lines.insert(1, ["-" * width for width in widths])
            lines += ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in table_lines]
            table_lines = []
        lines.append(line)
    return "\n".join(lines[:-1])


def provenance() -> dict[str, Any]:
    """Versions, hardware, commit, command and date."""
    import torch  # what only reads results does without

    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    device = (
        torch.get_device_module(accelerator).get_device_name()
        if accelerator is not None
        else "none"
    )
    return {
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": commit(),
        "versions": {name: version(name) for name in ("torch", "deepspeed")}
        | {"python": platform.python_version(), "cuda": torch.version.cuda or "none"},
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "accelerator": device,
        "load_at_start": LOAD_AT_START,
        "load_at_end": os.getloadavg()[0],
    }


def commit() -> str:
    """The commit that is measured; of a copy without its history, what DSEXT_COMMIT says."""
    if given := os.environ.get("DSEXT_COMMIT"):
        return given
    try:
        command = ["git", "rev-parse", "--short", "HEAD"]
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip()
    except FileNotFoundError:
        return ""


def cpu_model() -> str:
    """The processor's name as the kernel gives it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def path_of(name: str) -> Path:
    """Where the result `name` is kept: ``outputs/bench/<name>.json``, or in the folder that the
    variable OUT names."""
    folder = os.environ.get("OUT")
    return (Path(folder) if folder else ROOT / "outputs" / "bench") / f"{name}.json"


def write(name: str, settings: dict[str, Any], rows: Sequence[dict[str, Any]]) -> Path:
    """Write the result to its place and return the path."""
    path = path_of(name)
    result = {"provenance": provenance(), "settings": settings, "rows": list(rows)}
    replace(path, json.dumps(result, indent=2) + "\n")
    return path


def replace(path: Path, text: str) -> None:
    """Write the file as a whole: whoever reads it, or is killed here, has the old text or the new
    one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(text)
    fresh.replace(path)


def merge(
    name: str, settings: dict[str, Any], rows: Sequence[dict[str, Any]], key: str
) -> list[dict[str, Any]]:
    """Write `rows` beside those that the file holds from earlier runs, in place of any with the
    same `key`.

    Each row carries the provenance of its own run. Returns all rows of the file.
    """
    path, made = path_of(name), provenance()
    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    fresh = {row[key] for row in rows}
    merged = [row for row in kept if row[key] not in fresh]
    merged += [{**row, "made": made} for row in rows]
    write(name, settings, merged)
    return merged
