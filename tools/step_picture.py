"""Draws docs/gpu_step.svg from the stored gpu_h200_rivals.json: time and memory of a step on a GPU,
ours beside other ways to offload.

python -m tools.step_picture
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from tools import stored
from tools.architecture import ROOT

__all__ = ["PICTURE", "picture"]

PICTURE = ROOT / "docs" / "gpu_step.svg"
MEASURED = "gpu_h200_rivals.json"
BATCH = "1x8192"
OURS = "ours, exact rule"
NAMES = {
    ("exact_1x8192", "ZeRO, no overflow check"): "ZeRO-2, no offload",
    ("rivals", "FlashOptim"): "FlashOptim, no offload",
    ("rivals", "torchao CPUOffloadOptimizer, full bf16"): "torchao, all in bf16",
    ("exact_1x8192", "ours, exact"): OURS,
    ("rivals", "FSDP2, CPUOffloadPolicy"): "FSDP2, CPU offload",
    ("zenflow", "DeepSpeed's ZenFlow"): "DeepSpeed's ZenFlow",
    ("rivals", "ZeRO-Offload"): "ZeRO-Offload",
}
"""Ways to train in the picture's order, by result and name in the file."""
QUANTITIES = {
    "mean ms": ("ms per step", ",.0f"),
    "host GiB": ("GiB of host memory", ".1f"),
    "device GiB": ("GiB of the GPU", ".1f"),
}
WIDTH, LEFT, TOP, BAR, LANE = 540, 218, 58, 22, 29
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


def measured() -> dict[tuple[str, str], dict[str, Any]]:
    """The rows of `BATCH`, by result and way."""
    results: dict[str, Any] = stored.read(MEASURED)["settings"]["results"]
    return {
        (name, row["way"]): row
        for name, result in results.items()
        for row in result["rows"]
        if row.get("batch") == BATCH
    }


def commit() -> str:
    """That of the rows."""
    return str(stored.read(MEASURED)["provenance"]["commit"])


def panels() -> list[Panel]:
    """What was measured."""
    rows = measured()
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
        'aria-label="Time and memory of a step on one H200">'
    )
    yield f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
    title = "8,192 tokens, 1.5 billion parameters, one H200"
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
    says = f"measured at {commit()}, means; shorter is better"
    yield _text(14, height - 12, says, "font-size='15' fill='#555'")
    yield "</svg>"


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(text)}</text>'


if __name__ == "__main__":
    PICTURE.write_text(picture())
