"""Writes the two tables of README.md: measured steps of the default, and what fits on machines that
people own.

    python -m tools.front_tables

Steps come from the stored gpu_h200_default.json. What fits is computed by `tools.fits`, as
docs/fits.md is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product
from typing import Any

from tools import fits, stored
from tools.architecture import ROOT
from tools.step_picture import measured

__all__ = ["PAGE", "page", "speed_up"]

PAGE = ROOT / "README.md"
BATCHES = {"1x2048": "2,048 tokens", "1x8192": "8,192 tokens", "4x8192": "32,768 tokens"}
DEFAULT = "gpu_h200_default.json"
DEFAULT_RESULTS = {
    "1x2048": "default_1x2048",
    "1x8192": "default_1x8192",
    "4x8192": "decoder_step-1-5b-4x8192",
}
"""Where each batch was measured with today's choice of a share."""
DEFAULT_NAMES = {"ZeRO, no overflow check": "ZeRO-2, no offload", "ours": "deepspeed_ext"}
MACHINES: Sequence[tuple[str, int, int, Sequence[int]]] = (
    ("RTX 4090, 24 GB", 1, 24, (64, 96, 192)),
    ("2 x RTX 3090, 24 GB each", 2, 24, (128,)),
    ("8 x H100, 80 GB each", 8, 80, (1024,)),
)
"""Name, GPUs, GB of each, and GB of host memory."""
OFFLOAD = ((fits.ZERO_OFFLOAD, 2), (fits.ZERO_OFFLOAD, 3), (fits.SMALL[0], 3))


def steps_table() -> str:
    """Steps of the default config beside ZeRO-2 without offload: time and GPU memory."""
    results = stored.read(DEFAULT)["settings"]["results"]
    lines = []
    for way, name in DEFAULT_NAMES.items():
        rows = [
            next(row for row in results[kept]["rows"] if row["way"] == way)
            for kept in DEFAULT_RESULTS.values()
        ]
        cells = [f"{row['mean ms']:,.0f} ms, {row['device GiB']:.1f} GiB" for row in rows]
        bold = "**" if way == "ours" else ""
        lines.append([f"{bold}{name}{bold}", *cells])
    return fits._table(["one step of", *(BATCHES[batch] for batch in DEFAULT_RESULTS)], lines)


def speed_up() -> float:
    """ZeRO-Offload's time per step over ours, at 8,192 tokens."""
    rows = measured()
    return rows["rivals", "ZeRO-Offload"]["mean ms"] / rows["rivals", "ours"]["mean ms"]


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
    head = ["GPU", "host memory", "ZeRO-Offload", "ours, exact", "bf16 moments", "8-bit moments"]
    return fits._table(head, rows)


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
