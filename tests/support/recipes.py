"""Reads the recipes of docs/multi_node.md, so that what is run is what stands there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "multi_node.md"

_BLOCK = re.compile(r"^<!-- (recipe|file): (.+?) -->\n```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Recipe:
    """A command of the page, for bash.

    Attributes:
        name: as in ``<!-- recipe: NAME -->`` above the block.
        command: the block.
        on_each_node: whether it is typed on both nodes, with NODE_RANK 0 and 1:
            ``NAME, on each node``.
        files: contents by name, of the blocks ``<!-- file: FILE of NAME -->`` above.
    """

    name: str
    command: str
    on_each_node: bool = False
    files: Mapping[str, str] = field(default_factory=dict)

    def with_replaced(self, replacements: Mapping[str, str]) -> Recipe:
        """The recipe for other hosts, ports or scripts."""

        def replaced(text: str) -> str:
            for old, new in replacements.items():
                text = text.replace(old, new)
            return text

        files = {name: replaced(text) for name, text in self.files.items()}
        return replace(self, command=replaced(self.command), files=files)


def recipes(text: str | None = None) -> dict[str, Recipe]:
    """All recipes of the page, or of `text`, by name.

    Raises:
        ValueError: a name stands twice, or files belong to no recipe.
    """
    found: dict[str, Recipe] = {}
    files: dict[str, dict[str, str]] = {}
    for kind, title, block in _BLOCK.findall(PAGE.read_text() if text is None else text):
        if kind == "file":
            file, _, name = title.partition(" of ")
            files.setdefault(name, {})[file] = block
            continue
        name, _, where = title.partition(", ")
        if name in found or where not in ("", "on each node"):
            raise ValueError(
                f"recipe {title}: expected a new name, and 'on each node' or nothing behind a comma"
            )
        found[name] = Recipe(name, block, bool(where), files.pop(name, {}))
    if files:
        raise ValueError(f"files of no recipe below them: {files}")
    return found
