"""Draws docs/gpu_step.svg from benchmarks/gpu.json: time and memory of a step on a GPU, ours beside
DeepSpeed's ways.

python -m tools.step_picture
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from tools.architecture import ROOT

__all__ = ["PICTURE", "picture"]

PICTURE = ROOT / "docs" / "gpu_step.svg"
MEASURED = ROOT / "benchmarks" / "gpu.json"
MODEL, BATCH = "offload_step_1.5b", "1x8192"
OURS = "deepspeed_ext"
NAMES = {
    "ZeRO": "ZeRO-2, no offload",
    "ZeRO-Offload, DeepSpeedCPUAdam": "ZeRO-Offload",
    "upstream ZenFlow, overlapped": "DeepSpeed's ZenFlow",
    "predictive, interval 1": OURS,
}
"""Ways to train in the picture's order, by their names in the file."""
QUANTITIES = {
    "median ms": ("ms per step", ",.0f"),
    "host GiB": ("GiB of host memory", ".1f"),
    "device GiB": ("GiB of the GPU", ".1f"),
}
WIDTH, LEFT, TOP, BAR, LANE = 540, 198, 58, 22, 29
PANEL = 36 + LANE * len(NAMES)
"""Height of a quantity, with its title. The letters are large enough for a window of 420 pixels."""
COLORS = {True: "#2e7d32", False: "#9fa8da"}


@dataclass(frozen=True)
class Panel:
    """One quantity of all ways.

    Attributes:
        values: in the order of `NAMES`.
    """

    title: str
    values: Sequence[float]
    form: str


def panels() -> list[Panel]:
    """What was measured."""
    results: dict[str, Any] = json.loads(MEASURED.read_text())["settings"]["results"]
    rows = {row["variant"]: row for row in results[MODEL]["rows"] if row["batch"] == BATCH}
    return [
        Panel(title, [rows[name][key] for name in NAMES], form)
        for key, (title, form) in QUANTITIES.items()
    ]


def picture() -> str:
    """The whole file."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    found = panels()
    height = TOP + PANEL * len(found) + 30
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="sans-serif" font-size="17" role="img" '
        'aria-label="Time and memory of a step on one H100">'
    )
    yield f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
    title = "8,192 tokens, 1.5 billion parameters, one H100"
    yield _text(14, 28, title, "font-weight='bold' font-size='18'")
    for number, panel in enumerate(found):
        top = TOP + number * PANEL
        yield _text(14, top + 12, panel.title, "font-weight='bold' fill='#3949ab'")
        for lane, (value, name) in enumerate(zip(panel.values, NAMES.values(), strict=True)):
            y, width = top + 26 + lane * LANE, (WIDTH - LEFT - 70) * value / max(panel.values)
            color, bold = COLORS[name == OURS], "font-weight='bold'" if name == OURS else ""
            yield _text(14, y + 17, name, bold)
            yield (
                f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" '
                f'height="{BAR}" rx="3" fill="{color}"/>'
            )
            yield _text(LEFT + width + 8, y + 17, format(value, panel.form), bold)
    yield _text(14, height - 12, "measured; shorter is better", "font-size='15' fill='#555'")
    yield "</svg>"


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(text)}</text>'


if __name__ == "__main__":
    PICTURE.write_text(picture())
