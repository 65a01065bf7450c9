"""Draws docs/design/stream_waits.svg from the table of docs/results/zenflow_step.md: what steps
wait for their optimizer, by the length of a pass.

python -m tools.stream_picture
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from tools.architecture import ROOT

PAGE = ROOT / "docs" / "results" / "zenflow_step.md"
PICTURE = ROOT / "docs" / "design" / "stream_waits.svg"
HEAD = "| moments | way | "
WAYS = {
    ("any", "ZeRO-Offload at best, computed"): "#9fa8da",
    ("any", "exact without peeks, computed"): "#8d6e63",
    ("fp32", "exact"): "#2e7d32",
    ("8-bit", "exact"): "#81c784",
    ("fp32", "predictive"): "#e65100",
}
"""Moments and way of the rows that are drawn, and their colors."""
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 540, 470, 64, 150, 60
MOST = 4.5


def table() -> tuple[list[float], dict[tuple[str, str], list[float]]]:
    """The passes of the table, in steps, and the waits of each row."""
    lines = PAGE.read_text().splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith(HEAD))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[at:]]
    rows = rows[: next(n for n, row in enumerate(rows) if len(row) < 2)]
    waits = {(row[0], row[1]): [float(cell.split()[0]) for cell in row[2:]] for row in rows[2:]}
    return [float(cell) for cell in rows[0][2:]], waits


def picture() -> str:
    """The whole file."""
    return "\n".join(_lines(*table())) + "\n"


def _lines(passes: Sequence[float], waits: dict[tuple[str, str], list[float]]) -> Iterator[str]:
    right, bottom = WIDTH - 20, HEIGHT - BOTTOM
    begin, end = math.log2(passes[0]), math.log2(passes[-1])

    def x(value: float) -> float:
        return LEFT + (right - LEFT) * (math.log2(value) - begin) / (end - begin)

    def y(value: float) -> float:
        return bottom - (bottom - TOP) * value / MOST

    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'height="{HEIGHT}" font-family="sans-serif" font-size="16" role="img" '
        'aria-label="What steps wait for their optimizer, by the length of a pass">'
    )
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    yield _text(14, 26, "Steps waited for the optimizer, simulated", "font-weight='bold'")
    for number, ((moments, way), color) in enumerate(WAYS.items()):
        name = way if moments == "any" else f"{way}, {moments} moments"
        at = 50 + 20 * number
        yield f'<rect x="14" y="{at - 10}" width="22" height="6" fill="{color}"/>'
        yield _text(44, at, name, "font-size='15'")
    for steps in range(math.floor(MOST) + 1):
        yield (
            f'<line x1="{LEFT}" x2="{right}" y1="{y(steps):.1f}" y2="{y(steps):.1f}" '
            'stroke="#ddd"/>'
        )
        yield _text(LEFT - 12, y(steps) + 5, f"{steps}", "text-anchor='end'")
    for value in passes:
        yield _text(x(value), bottom + 24, f"{value:g}", "text-anchor='middle'")
    label = "a pass over the optimizer's state, in steps"
    yield _text((LEFT + right) / 2, HEIGHT - 12, label, "text-anchor='middle' fill='#555'")
    for key, color in WAYS.items():
        points = " ".join(
            f"{x(each):.1f},{y(value):.1f}" for each, value in zip(passes, waits[key], strict=True)
        )
        yield f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="3"/>'
    yield "</svg>"


def _text(x: float, y: float, text: str, style: str) -> str:
    return f'<text x="{x:.4g}" y="{y:.4g}" {style}>{escape(text)}</text>'


if __name__ == "__main__":
    PICTURE.write_text(picture())
