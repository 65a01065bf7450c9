"""``deepspeed-ext report RUN``: where the time of a run's steps went, as one picture.

It reads what ZenFlow runs record: ``trainer_state.json`` of the Hugging Face Trainer (with
`log_measurements`), or a JSON Lines file of ``measurements()`` (the example's ``metrics.jsonl``).
"""

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from deepspeed_ext.errors import ConfigError

__all__ = ["lanes_of", "picture", "read_records"]

FILES = ("trainer_state.json", "metrics.jsonl")
NAMES = ("device_ms", "step_ms", "wait_ms", "worker_ms", "link_ms", "interval", "overlap")
FREE_FRACTION = 0.05
"""A run whose steps wait for less than this fraction is not limited by the optimizer."""

WIDTH, LEFT, TOP, LANE, BAR = 540, 118, 112, 44, 30
BLUE, GREEN, ORANGE, RED = "#9fa8da", "#2e7d32", "#ef6c00", "#c62828"


def read_records(run: Path) -> list[dict[str, float]]:
    """Read the measurements of each logged step, in order, by name without ``dsext/`` or
    ``zenflow_``.

    Args:
        run: one of `FILES`, or a folder that holds one, also in its newest ``checkpoint-N``.

    Raises:
        ConfigError: there is no such file, or it holds no ZenFlow measurements.
    """
    path = run if run.is_file() else _file_in(run)
    try:
        text = path.read_text()
        if path.suffix == ".json":
            rows = json.loads(text)["log_history"]
        else:
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        found = [record for record in map(_record, rows) if record]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path}: expected the Trainer's trainer_state.json, or a JSON object on each line "
            f"({type(error).__name__}: {error})"
        ) from error
    if not found:
        raise ConfigError(
            f"{path} holds no measurement of ZenFlow. Under the Trainer call log_measurements("
            "trainer) before it trains; in a loop of your own write "
            "engine.optimizer.measurements() to a file, one JSON object on each line"
        )
    return found


def _file_in(folder: Path) -> Path:
    def number(path: Path) -> int:
        digits = path.name.removeprefix("checkpoint-")
        return int(digits) if digits.isdigit() else -1

    checkpoints = sorted(folder.glob("checkpoint-*"), key=number, reverse=True)
    for place in (folder, *checkpoints):
        for name in FILES:
            if (place / name).is_file():
                return place / name
    raise ConfigError(
        f"{folder}: expected a file or a folder with {' or '.join(FILES)} of a run, got neither"
    )


def _record(row: dict[str, Any]) -> dict[str, float]:
    """ZenFlow's measurements among the values of one log entry, and the step's time."""
    plain = {name.removeprefix("dsext/").removeprefix("zenflow_"): row[name] for name in row}
    found = {name: float(plain[name]) for name in NAMES if plain.get(name) is not None}
    if found and "seconds" in plain:
        found["total_ms"] = 1e3 * float(plain["seconds"])
    return found


@dataclass(frozen=True)
class Lanes:
    """A typical step: medians over the overlapped steps of a run, in milliseconds.

    Attributes:
        total: from the end of one optimizer step to the end of the next.
        wait: the part in which the accelerator waited for the worker or the link.
        worker: busy time of the optimizer process, per step.
        link: copies beside the step; 0 if they run inside it.
        steps: number of logged steps behind the medians.
        waits: fraction of each logged step spent waiting, in order.
    """

    total: float
    wait: float
    worker: float
    link: float
    steps: int
    waits: tuple[float, ...]

    @property
    def verdict(self) -> str:
        """What limited the run, in a sentence."""
        share = self.wait / self.total if self.total else 0.0
        if share < FREE_FRACTION:
            return f"The model limits this run: {share:.1%} of a step waits for the optimizer."
        limit = "optimizer process" if self.worker >= self.link else "link to the host"
        return f"The {limit} limits this run: {share:.0%} of a step waits for it."

    @property
    def remedy(self) -> str:
        """What would make the run faster."""
        if self.wait < FREE_FRACTION * self.total:
            return "Nothing to gain from more cores for the optimizer."
        if self.worker >= self.link:
            return "Give it more cores, bf16 moments or more tokens per step."
        return "Use more tokens per step; check the link's width and sharing."


def lanes_of(records: Sequence[dict[str, float]]) -> Lanes:
    """The typical step of a run.

    Raises:
        ConfigError: no step overlapped with its update, or their times are missing.
    """
    timed: list[dict[str, float]] = []
    last: dict[str, float] = {}
    for record in records:
        last = {**last, **record}  # the Trainer's log leaves out what has not changed
        if "total_ms" not in record and {"device_ms", "step_ms"} <= set(last):
            last["total_ms"] = last["device_ms"] + last["step_ms"]
        if "overlap" in last and {"total_ms", "wait_ms", "worker_ms"} <= set(last):
            timed.append(last)
    if not timed:
        raise ConfigError(
            f"none of {len(records)} logged steps overlapped with its update. Warm-up steps never "
            "do: log more steps. If zenflow_guard_synchronous is 1, the guard keeps steps "
            "synchronous"
        )

    def median(name: str) -> float:
        return statistics.median(record.get(name, 0.0) for record in timed)

    waits = tuple(min(1.0, each["wait_ms"] / (each["total_ms"] or 1.0)) for each in timed)
    worker = statistics.median(each["worker_ms"] / each.get("interval", 1.0) for each in timed)
    return Lanes(
        median("total_ms"), median("wait_ms"), worker, median("link_ms"), len(timed), waits
    )


def picture(lanes: Lanes) -> str:
    """The lanes of a typical step and the waits of the run, as SVG."""
    return "\n".join(_lines(lanes)) + "\n"


def _lines(lanes: Lanes) -> Iterator[str]:
    height = TOP + 3 * LANE + 190
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="sans-serif" font-size="15" role="img" '
        f'aria-label="{escape(lanes.verdict)}">'
    )
    yield f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
    yield _text(14, 28, lanes.verdict, "font-weight='bold'")
    yield _text(14, 52, lanes.remedy)
    yield _text(
        14, 86, f"A typical step in ms: medians of {lanes.steps} overlapped steps", "fill='#555'"
    )
    longest = max(lanes.total, lanes.worker, lanes.link) or 1.0
    busy = max(0.0, lanes.total - lanes.wait)
    rows = (
        ("accelerator", ((busy, BLUE), (lanes.wait, RED)), f"{lanes.total:.1f}"),
        ("optimizer", ((lanes.worker, GREEN),), f"{lanes.worker:.1f}"),
        ("link", ((lanes.link, ORANGE),), f"{lanes.link:.1f}" if lanes.link else "inside"),
    )
    for lane, (name, bars, said) in enumerate(rows):
        y, x = TOP + lane * LANE, float(LEFT)
        yield _text(14, y + 20, name)
        for value, color in bars:
            width = (WIDTH - LEFT - 80) * value / longest
            yield f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{color}"/>'
            x += width
        yield _text(x + 8, y + 20, said)
    top = TOP + 3 * LANE + 40
    bottom = top + 100
    yield _text(14, top - 12, "Fraction of each step spent waiting (red above)", "fill='#555'")
    yield f'<path d="M{LEFT},{top} V{bottom} H{WIDTH - 20}" fill="none" stroke="#666"/>'
    yield _text(66, top + 10, "100 %") + _text(84, bottom, "0 %")
    across = (WIDTH - LEFT - 20) / max(1, len(lanes.waits) - 1)
    points = " ".join(
        f"{LEFT + across * number:.1f},{bottom - 100 * wait:.1f}"
        for number, wait in enumerate(lanes.waits)
    )
    yield f'<polyline points="{points}" fill="none" stroke="{RED}" stroke-width="2"/>'
    yield "</svg>"


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(text)}</text>'
