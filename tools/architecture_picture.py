"""Draws docs/architecture.svg: the parts of a rank, its optimizer process, and what goes between them.

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
WIDTH, HEIGHT = 980, 620
COLORS = {"blue": ("#e8eefc", "#3f51b5"), "green": ("#e6f4ea", "#2e7d32"), "sand": ("#fdf3e1", "#b26a00")}


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
    Box(20, 20, 560, 450, "Training process, one for each rank"),
    Box(720, 130, 240, 340, "Its optimizer process", color="green"),
    Box(20, 500, 560, 100, "Accelerator", color="sand"),
)
BOXES = (
    Box(40, 60, 520, 50, "Your script, or a Trainer", (), ("deepspeed_ext.enable(), then deepspeed.initialize(...)",)),
    Box(40, 130, 250, 66, "Entry and engine", ("adapter",), ("subclasses of DeepSpeed's engines",)),
    Box(310, 130, 250, 66, "Config", ("config",), ("the fields under zero_optimization",)),
    Box(
        40, 216, 520, 66, "ZeRO optimizers", ("adapter",), ("subclasses of DeepSpeed's; the folders below do the work",)
    ),
    Box(40, 302, 120, 66, "Start-up", ("flatten",), ("stages 1, 2",)),
    Box(173, 302, 120, 66, "Gathers", ("gather",), ("stage 3",)),
    Box(306, 302, 254, 66, "ZenFlow", ("zenflow.step", "zenflow.rules"), ("predictive or selective",)),
    Box(40, 388, 120, 66, "Cores", ("cores",), ("of all threads",)),
    Box(173, 388, 254, 66, "Checkpoints", ("checkpoint", "checkpoint.reshard"), ("all ranks commit, or none",)),
    Box(440, 388, 120, 66, "Agreement", ("runtime",), ("one error for all",)),
    Box(740, 170, 200, 70, "Loop", ("zenflow.worker",), ("takes orders, answers",), "green"),
    Box(740, 260, 200, 70, "Pass over memory", ("zenflow.worker.kernel",), ("the exact Adam step, in C++",), "green"),
    Box(
        740,
        350,
        200,
        100,
        "Shared memory",
        (),
        ("p, m and v in fp32", "gradients of the steps in flight", "new weights y"),
        "green",
    ),
    Box(40, 535, 250, 50, "Weights and gradients, 16 bit", (), ("flat buffers of ZeRO",), "sand"),
    Box(310, 535, 250, 50, "Room for transfers", (), ("gradient on its way, y on its way",), "sand"),
)
ARROWS = (
    ((580, 205), (720, 205), "orders, answers", True),
    ((580, 390), (720, 390), "gradients", False),
    ((720, 425), (580, 425), "weights y", False),
    ((300, 470), (300, 500), "", True),
)


def picture() -> str:
    """The whole file."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="13" role="img" aria-label="Parts of deepspeed_ext">'
    )
    yield '<defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
    yield 'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="#444"/></marker></defs>'
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    for area in AREAS:
        fill, stroke = COLORS[area.color]
        yield _rectangle(area, fill, stroke, 10)
        yield _text(area.x + 16, area.y + 24, area.title, "font-weight='bold'")
    for box in BOXES:
        yield _rectangle(box, "white", COLORS[box.color][1], 6)
        lines = [(box.title, "font-weight='bold'")]
        lines += [("  ".join(box.folders), "font-family='monospace' font-size='12'")] if box.folders else []
        lines += [(line, "font-size='12' fill='#444'") for line in box.lines]
        for number, (line, style) in enumerate(lines):
            yield _text(box.x + 10, box.y + 20 + 18 * number, line, style)
    for (x1, y1), (x2, y2), label, both in ARROWS:
        begin = ' marker-start="url(#end)"' if both else ""
        yield f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="#444" marker-end="url(#end)"{begin}/>'
        if label:
            yield _text((x1 + x2) // 2, y1 - 7, label, "text-anchor='middle' font-size='12'")
    yield "</svg>"


def _rectangle(box: Box, fill: str, stroke: str, radius: int) -> str:
    at = f'x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="{radius}"'
    return f'<rect {at} fill="{fill}" stroke="{stroke}"/>'


def _text(x: int, y: int, text: str, style: str) -> str:
    return f'<text x="{x}" y="{y}" {style}>{escape(text)}</text>'


if __name__ == "__main__":
    PICTURE.write_text(picture())
