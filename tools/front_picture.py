"""Draws docs/overview.svg: three steps with ZeRO-Offload and with ZenFlow, in lanes of time. The
lengths are invented.

python -m tools.front_picture
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

from tools.architecture import ROOT

__all__ = ["PICTURE", "picture"]

PICTURE = ROOT / "docs" / "overview.svg"
WIDTH, HEIGHT, LEFT, UNIT = 540, 372, 66, 15
LANE, BAR = 48, 38
# Letters are large enough for a window of 420 pixels.
STEP, ADAM, STEPS = 6, 4, 3
"""Units of time of a forward and backward, of the optimizer, and how many steps are drawn."""
COLORS = {
    "step": ("#e8eefc", "#3f51b5"),
    "adam": ("#e6f4ea", "#2e7d32"),
    "idle": ("none", "#c62828"),
}


@dataclass(frozen=True)
class Bar:
    """A time in which a lane does something, in units."""

    lane: int
    begin: float
    length: float
    text: str
    kind: str


def bars() -> Iterator[Bar]:
    """Lanes 0 and 1: ZeRO-Offload. Lanes 2 and 3: with ZenFlow."""
    for number in range(STEPS):
        begin = number * (STEP + ADAM)
        yield Bar(0, begin, STEP, f"step {number + 1}", "step")
        yield Bar(0, begin + STEP, ADAM, "waits", "idle")
        yield Bar(1, begin + STEP, ADAM, "Adam", "adam")
        yield Bar(2, number * STEP, STEP, f"step {number + 1}", "step")
        yield Bar(3, (number + 1) * STEP, ADAM, "Adam", "adam")


def picture() -> str:
    """The whole file."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="sans-serif" font-size="17" role="img" aria-label="Steps '
        'with ZeRO-Offload and with ZenFlow">'
    )
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    yield _text(14, 30, "ZeRO-Offload: the GPU waits for the optimizer", "font-weight='bold'")
    ours = "ZenFlow, predictive: Adam runs beside the next step"
    yield _text(14, 186, ours, "font-weight='bold'")
    for lane, name in enumerate(("GPU", "CPU", "GPU", "CPU")):
        yield _text(14, _top(lane) + 25, name, "")
    for bar in bars():
        fill, stroke = COLORS[bar.kind]
        x, width = LEFT + bar.begin * UNIT, bar.length * UNIT - 3
        dashed = ' stroke-dasharray="5 4"' if bar.kind == "idle" else ""
        yield (
            f'<rect x="{x:g}" y="{_top(bar.lane)}" width="{width:g}" height="{BAR}" rx="5" '
            f'fill="{fill}" stroke="{stroke}"{dashed}/>'
        )
        yield _text(x + width / 2, _top(bar.lane) + 25, bar.text, "text-anchor='middle'")
    saved = LEFT + STEPS * STEP * UNIT + ADAM * UNIT
    yield _text(saved + 8, _top(3) + 25, "time saved", "fill='#2e7d32' font-weight='bold'")
    yield f'<line x1="{LEFT}" y1="332" x2="{WIDTH - 14}" y2="332" stroke="#666"/>'
    yield _text(LEFT, 356, "time (a drawing, not a measurement)", "font-size='15' fill='#555'")
    yield "</svg>"


def _top(lane: int) -> int:
    return 42 + lane * LANE + (60 if lane > 1 else 0)


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(text)}</text>'


if __name__ == "__main__":
    PICTURE.write_text(picture())
