"""Draws docs/overview.svg: three steps with ZeRO-Offload and with ZenFlow, in lanes of time. The lengths are invented.

python -m tools.front_picture
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

from tools.architecture import ROOT

__all__ = ["PICTURE", "picture"]

PICTURE = ROOT / "docs" / "overview.svg"
WIDTH, HEIGHT, LEFT, UNIT = 980, 400, 190, 26
LANE, BAR = 52, 40
STEP, ADAM, STEPS = 6, 4, 3
"""Units of time of a forward and backward, of the optimizer, and how many steps are drawn."""
COLORS = {"step": ("#e8eefc", "#3f51b5"), "adam": ("#e6f4ea", "#2e7d32"), "idle": ("none", "#c62828")}


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
        yield Bar(1, begin + STEP, ADAM, f"Adam {number + 1}", "adam")
        yield Bar(2, number * STEP, STEP, f"step {number + 1}", "step")
        yield Bar(3, (number + 1) * STEP, ADAM, f"Adam {number + 1}", "adam")


def picture() -> str:
    """The whole file."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="16" role="img" aria-label="Steps with ZeRO-Offload and with ZenFlow">'
    )
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    yield _text(20, 34, "ZeRO-Offload: the accelerator waits for the optimizer on the CPU", "font-weight='bold'")
    yield _text(20, 204, "With ZenFlow: a process beside the training computes Adam", "font-weight='bold'")
    for lane, name in enumerate(("accelerator", "CPU", "accelerator", "optimizer process")):
        yield _text(20, _top(lane) + 26, name, "")
    for bar in bars():
        fill, stroke = COLORS[bar.kind]
        x, width = LEFT + bar.begin * UNIT, bar.length * UNIT - 3
        dashed = ' stroke-dasharray="5 4"' if bar.kind == "idle" else ""
        yield (
            f'<rect x="{x:g}" y="{_top(bar.lane)}" width="{width:g}" height="{BAR}" rx="5" fill="{fill}" '
            f'stroke="{stroke}"{dashed}/>'
        )
        yield _text(x + width / 2, _top(bar.lane) + 26, bar.text, "text-anchor='middle'")
    saved = LEFT + STEPS * STEP * UNIT + ADAM * UNIT
    yield _text(saved + 14, _top(2) + 26, "time saved", "fill='#2e7d32' font-weight='bold'")
    yield f'<line x1="{LEFT}" y1="356" x2="{WIDTH - 10}" y2="356" stroke="#666"/>'
    yield _text(LEFT, 380, "time (a drawing, not a measurement)", "font-size='13' fill='#555'")
    yield "</svg>"


def _top(lane: int) -> int:
    return 48 + lane * LANE + (66 if lane > 1 else 0)


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" {style}>{escape(text)}</text>'


if __name__ == "__main__":
    PICTURE.write_text(picture())
