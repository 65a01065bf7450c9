"""Writes the two tables of README.md: measured steps of the default, and what fits on machines that
people own.

    python -m tools.front_tables

Steps come from the stored gpu_h200_rivals.json. What fits is computed by `tools.fits`, as
docs/fits.md is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from typing import Any

from tools import fits
from tools.architecture import ROOT
from tools.step_picture import NAMES, OURS, measured

__all__ = ["PAGE", "page", "speed_up"]

PAGE = ROOT / "README.md"
NUMERICS = {
    "ZeRO-2, no offload": "AdamW",
    "FlashOptim, no offload": "8-bit moments",
    OURS: "AdamW's bits",
    "ZeRO-Offload": "AdamW",
}
"""Of the ways in the table, by name in the picture of a step."""
MACHINES: Sequence[tuple[str, int, int, Sequence[int]]] = (
    ("RTX 4090, 24 GB", 1, 24, (64, 96, 192)),
    ("2 x RTX 3090, 24 GB each", 2, 24, (128,)),
    ("8 x H100, 80 GB each", 8, 80, (1024,)),
)
"""Name, GPUs, GB of each, and GB of host memory."""
OFFLOAD = ((fits.ZERO_OFFLOAD, 2), (fits.ZERO_OFFLOAD, 3), (fits.SMALL[0], 3))


def steps_table() -> str:
    """A step with and without offload: time, memory, and what its arithmetic is."""
    lines = []
    keys = {name: key for key, name in NAMES.items()}
    for name, numerics in NUMERICS.items():
        row, bold = measured()[keys[name]], "**" if name == OURS else ""
        cells = [f"{row['mean ms']:,.0f} ms", f"{row['device GiB']:.1f}", f"{row['host GiB']:.1f}"]
        lines.append([f"{bold}{name}{bold}", *cells, numerics])
    return fits._table(["way", "one step", "GPU GiB", "host GiB", "numerics"], lines)


def speed_up() -> float:
    """ZeRO-Offload's time per step over that of the exact rule, at 8,192 tokens."""
    by_name = {name: measured()[key]["mean ms"] for key, name in NAMES.items()}
    return by_name["ZeRO-Offload"] / by_name[OURS]


def _ours(end: str) -> list[tuple[str, fits.Stage]]:
    ways = product((fits.OURS, fits.IN_STEP, fits.EARLY), fits.STAGES)
    return [*((name + end, stage) for name, stage in ways), (fits.SMALL[1] + end, 3)]


def _largest(ways: Sequence[tuple[str, Any]], gpus: int, gpu: int, host: int) -> str:
    found = [fits.largest(name, stage, gpus, gpu, host) for name, stage in ways]
    shapes = [shape for shape in found if shape is not None]
    return fits._billions(max(shapes, key=lambda shape: shape.params, default=None)) + "B"


def fits_table() -> str:
    """The largest model of ZeRO-Offload and ours, each in its best way."""
    ways = (OFFLOAD, _ours(""), _ours(fits.ROUNDED), _ours(fits.CODED))
    rows = [
        [name, f"{host:,} GB", *(_largest(way, gpus, gpu, host) for way in ways)]
        for name, gpus, gpu, hosts in MACHINES
        for host in hosts
    ]
    ours = "ours, fp32 moments", "bf16 moments", "8-bit moments"
    return fits._table(["GPU", "host memory", "ZeRO-Offload", *ours], rows)


def page() -> str:
    """README.md with all tables between their markers."""
    text = PAGE.read_text()
    tables = {"steps": steps_table(), "fits": fits_table()}
    for name, table in tables.items():
        mark = f"<!-- {name}: written by `make docs` -->"
        pattern = re.compile(rf"{re.escape(mark)}\n.*?(?=\n\n|\Z)", re.DOTALL)
        assert len(pattern.findall(text)) == 1, f"README.md has no place for the table of {name}"
        text = pattern.sub(f"{mark}\n{table.rstrip()}", text)
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
