"""The quick start of docs/getting_started.md: the script and the command, as the page has them."""

from __future__ import annotations

import re

from tests.support.paths import ROOT

__all__ = ["COMMAND", "SCRIPT", "losses"]

_SECTION = (
    (ROOT / "docs/getting_started.md")
    .read_text()
    .partition("## Quick start\n")[2]
    .partition("\n## ")[0]
)
_BLOCKS = re.findall(r"```(python|bash)\n(.*?)```", _SECTION, re.DOTALL)

SCRIPT: str = next(text for kind, text in _BLOCKS if kind == "python")
COMMAND: list[str] = (
    next(text for kind, text in _BLOCKS if kind == "bash").partition("#")[0].split()
)


def losses(output: str) -> list[float]:
    """What the script printed."""
    return [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+)$", output, re.MULTILINE)]
