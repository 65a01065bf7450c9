"""Writes the two tables of README.md: measured steps of the default, and what fits on machines that
people own.

    python -m tools.front_tables

Steps come from the stored gpu_h200_rivals.json. What fits is computed by `tools.fits`, as
docs/memory.md is.
"""

from __future__ import annotations

import re

from tools import fits
from tools.architecture import ROOT
from tools.step_picture import NAMES, OURS, measured

__all__ = ["PAGE", "page"]

PAGE = ROOT / "README.md"
NUMERICS = {
    "ZeRO-2, no offload": "AdamW",
    "FlashOptim, no offload": "8-bit moments",
    OURS: "AdamW",
    "ZeRO-Offload": "AdamW",
}
"""Of the ways in the table, by name in the picture of a step."""
MACHINES = {
    "RTX 4090, 24 GB": fits.Owned("rtx4090", 1, (64, 96, 192)),
    "2 x RTX 3090, 24 GB each": fits.Owned("rtx3090", 2, (128,)),
    "8 x H100, 80 GB each": fits.Owned("h100", 8, (1024,)),
}
"""By name, with GB of host memory."""


def steps_table() -> str:
    """A step with and without offload: time, memory, and what its arithmetic is."""
    lines = []
    keys = {name: key for key, name in NAMES.items()}
    for name, numerics in NUMERICS.items():
        row, bold = measured()[keys[name]], "**" if name == OURS else ""
        cells = [f"{row['mean ms']:,.0f} ms", f"{row['device GiB']:.1f}", f"{row['host GiB']:.1f}"]
        lines.append([f"{bold}{name}{bold}", *cells, numerics])
    return fits.table(["way", "one step", "GPU GiB", "host GiB", "numerics"], lines)


def fits_table() -> str:
    """The largest model of ZeRO-Offload, ours and FlashOptim, each in its best way."""
    rows = [
        [name, f"{host:,} GB", *(f"{billions}B" for billions in fits.row(machine, host))]
        for name, machine in MACHINES.items()
        for host in machine.host_gib
    ]
    return fits.table(["GPU", "host memory", *fits.groups(), "FlashOptim"], rows)


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
