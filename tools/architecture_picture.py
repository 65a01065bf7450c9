"""Draws docs/architecture.svg: the parts of a rank, its optimizer process, and what goes between
them.

    python -m tools.architecture_picture

Words in typewriter letters are folders of the package (docs/architecture.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

from tools.architecture import ROOT

__all__ = ["AREAS", "BOXES", "PICTURE", "picture"]

PICTURE = ROOT / "docs" / "architecture.svg"
WIDTH, HEIGHT = 540, 1040
"""The letters are large enough for a window of 420 pixels."""
COLORS = {
    "blue": ("#e8eefc", "#3f51b5"),
    "green": ("#e6f4ea", "#2e7d32"),
    "sand": ("#fdf3e1", "#b26a00"),
}


@dataclass(frozen=True)
class Box:
    """A rectangle with a title, the folders that do its work, and lines of text."""

    x: int
    y: int
    width: int
    height: int
    title: str
    folders: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    color: str = "blue"


AREAS = (
    Box(10, 10, 520, 116, "Accelerator", color="sand"),
    Box(10, 184, 520, 498, "Training process, one for each rank"),
    Box(10, 766, 520, 264, "Its optimizer process", color="green"),
)
LEFT, RIGHT, ALL, HALF = 24, 275, 492, 241
BOXES = (
    Box(LEFT, 48, HALF, 64, "Weights, gradients", (), ("16 bit, ZeRO's flat buffers",), "sand"),
    Box(RIGHT, 48, HALF, 64, "Room for transfers", (), ("a gradient down, y up",), "sand"),
    Box(LEFT, 222, ALL, 62, "Your script, or a Trainer", (), ("enable(), then deepspeed.initialize(...)",)),
    Box(LEFT, 296, HALF, 84, "Entry and engine", ("adapter",), ("DeepSpeed's, subclassed",)),
    Box(RIGHT, 296, HALF, 84, "Config", ("config",), ("under zero_optimization",)),
    Box(LEFT, 392, ALL, 84, "ZeRO optimizers", ("adapter",), ("DeepSpeed's, subclassed; below is what they use",)),
    Box(LEFT, 488, 260, 84, "ZenFlow", ("zenflow.step", "zenflow.rules"), ("predictive or selective",)),
    Box(294, 488, 106, 84, "Start-up", ("flatten",), ("stages 1, 2",)),
    Box(410, 488, 106, 84, "Gathers", ("gather",), ("stage 3",)),
    Box(LEFT, 584, 260, 84, "Checkpoints", ("checkpoint",), ("all ranks commit, or none",)),
    Box(294, 584, 106, 84, "Agreement", ("runtime",), ("one error",)),
    Box(410, 584, 106, 84, "Cores", ("cores",), ("of threads",)),
    Box(LEFT, 804, HALF, 84, "Loop", ("zenflow.worker",), ("takes orders, answers",), "green"),
    Box(RIGHT, 804, HALF, 84, "Pass over memory", ("zenflow.worker.kernel",), ("exact Adam, in C++",), "green"),
    Box(
        LEFT, 900, ALL, 116, "Shared memory", (),
        ("p, m and v in fp32", "gradients of the steps in flight", "new weights y"), "green",
    ),
)  # fmt: skip
ARROWS = (
    (270, 126, 184, "copies beside the steps", True),
    (90, 682, 766, "orders", True),
    (230, 682, 766, "gradients", False),
    (390, 766, 682, "weights y", False),
)
"""Where each is, from which height to which, what goes there, and whether it goes both ways."""


def picture() -> str:
    """The whole file."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} '
        f'{HEIGHT}" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        'font-size="17" role="img" aria-label="Parts of deepspeed_ext">'
    )
    yield (
        '<defs><marker id="end" viewBox="0 0 8 8" refX="7" '
        'refY="4" markerWidth="8" markerHeight="8" '
    )
    yield 'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="#444"/></marker></defs>'
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    for area in AREAS:
        fill, stroke = COLORS[area.color]
        yield _rectangle(area, fill, stroke, 10)
        yield _text(area.x + 14, area.y + 26, area.title, "font-weight='bold'")
    for box in BOXES:
        yield _rectangle(box, "white", COLORS[box.color][1], 6)
        lines = [(box.title, "font-weight='bold'")]
        lines += (
            [(" ".join(box.folders), "font-family='monospace' font-size='15'")]
            if box.folders
            else []
        )
        lines += [(line, "font-size='16' fill='#444'") for line in box.lines]
        for number, (line, style) in enumerate(lines):
            yield _text(box.x + 10, box.y + 24 + 25 * number, line, style)
    for x, y1, y2, label, both in ARROWS:
        begin = ' marker-start="url(#end)"' if both else ""
        yield (
            f'<line x1="{x}" y1="{y1}" x2="{x}" y2="{y2}" stroke="#444" '
            f'marker-end="url(#end)"{begin}/>'
        )
        yield _text(x + 10, (y1 + y2) // 2 + 6, label, "font-size='16'")
    yield "</svg>"


def _rectangle(box: Box, fill: str, stroke: str, radius: int) -> str:
    at = f'x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="{radius}"'
    return f'<rect {at} fill="{fill}" stroke="{stroke}"/>'


def _text(x: int, y: int, text: str, style: str) -> str:
    return f'<text x="{x}" y="{y}" {style}>{escape(text)}</text>'


if __name__ == "__main__":
    PICTURE.write_text(picture())
