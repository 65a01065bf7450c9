"""Traces what the first pages say of a step on a GPU to the stored rows that were measured.

    python -m tools.figures     # every claim, the row that it is of, and what no row gives;
                                # tools.derived has ratios and losses

A claim is a line of a table, a cell that has its own unit, or a figure in a sentence: milliseconds
or GiB, with a deviation or without. It is traced when one row rounds to all of its figures and the
section names the commit of that row, so nobody reads an old commit's row as today's default.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from tools import stored
from tools.architecture import ROOT

__all__ = ["PAGES", "Claim", "claims", "row_of", "without_commit"]

PAGES = {
    "README.md": ("How fast?",),
    "docs/README.md": (),
    "docs/which.md": (),
    "docs/results.md": ("Speed",),
    "docs/results/gpu.md": (
        "The default on an H200",
        "Rivals on an H200",
        "The exact rule at stage 2",
        "The exact rule on an H200",
        "7 billion parameters on an H200",
        "Step",
        "Step on the H200",
    ),
}
"""Pages with the sections that have measured steps; the whole page where none is named."""
TABLES_ONLY = ("docs/results/gpu.md",)
"""Pages whose sentences also compare, expect and explain."""
FILES = ("gpu_h200_rivals.json", "gpu_h200_default.json", "gpu_h200.json", "gpu.json")
FIELDS = (
    *("mean ms", "median ms", "deviation ms", "least ms", "most ms", "longest ms"),
    *("longest step ms", "warm-up ms", "wait ms", "worker ms", "tokens/s"),
    *("device GiB", "host GiB", "page-locked GiB"),
)
PARAMETERS = {"1.5b": 1.49722e9, "7b": 6.7384e9}
WITHOUT_OFFLOAD = ("ZeRO", "ZeRO, no overflow check")
NOT_MEASURED = {
    "119 GiB": "planned, by ZeRO-Offload's source",
    "126 GiB": "the host's memory",
    "520 ms": "arithmetic",
    "460 ms": "arithmetic",
}
FIGURE = r"(\d[\d,]*\d(?:\.\d+)?|\d(?:\.\d+)?)(?: ± (\d+))?"


class Row(NamedTuple):
    """A measured row: where it is stored, the commit that ran, and its numbers."""

    place: str
    commit: str
    values: tuple[float, ...]


class Claim(NamedTuple):
    """Figures that a page gives together."""

    page: str
    text: str
    figures: tuple[str, ...]
    section: str


@cache
def rows() -> list[Row]:
    """All stored rows of steps."""
    return [
        Row(
            f"{name}: {result}, {row['case']}",
            row.get("made", content.get("provenance", {})).get("commit", ""),
            (
                *(row[field] for field in FIELDS if isinstance(row.get(field), float | int)),
                *_computed(row, content["rows"]),
            ),
        )
        for name in FILES
        for result, content in stored.read(name)["settings"]["results"].items()
        if isinstance(content, dict)
        for row in content.get("rows", [])
        if "median ms" in row and "case" in row
    ]


def _computed(row: dict[str, Any], beside: list[dict[str, Any]]) -> Iterator[float]:
    """Percent of a step without kernels, percent of the optimizer on the host, and ZeRO's time
    over the row's."""
    if (idle := row.get("idle share, no kernel")) is not None:
        yield 100 * idle
    if (down := row.get("bytes down")) is not None:  # 2 bytes of each element
        yield 50 * down / PARAMETERS[row.get("model", "1.5b")]
    for other in beside:
        if other["case"] in (f"{way}, {row['batch']}" for way in WITHOUT_OFFLOAD):
            time = "mean ms" if "mean ms" in row else "median ms"
            yield other[time] / row[time]


def claims(page: str, text: str | None = None) -> Iterator[Claim]:
    """What a page says of steps; `text` stands for the page's own."""
    text = (ROOT / page).read_text() if text is None else text
    parts = [text.split(f"## {title}\n")[1].split("\n## ")[0] for title in PAGES[page]]
    for block in "\n\n".join(parts or [text]).split("\n\n"):
        if "```" in block:
            continue
        lines = block.splitlines()
        table = [line for line in lines if line.startswith("|")]
        yield from (Claim(page, *claim, text) for claim in of_table(table))
        if page in TABLES_ONLY:
            continue
        prose = " ".join(line for line in lines if not line.startswith("|"))
        prose = re.sub(r"!?\[[^]]*\]\([^)]*\.svg\)", "", prose)
        for match in re.finditer(rf"{FIGURE}(?: (ms|GiB)\b)?", prose):
            if (match[2] or match[3]) and match[0] not in NOT_MEASURED:
                yield Claim(page, match[0], _figures(match[0]), text)


def of_table(lines: list[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    if not lines:
        return
    head, _, *body = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    heads = r"\bms\b|GiB|one step|tokens|deviation|median|longest|least|page-locked"
    heads += "|practicality|speed|no kernel|on the host"
    numbers = [i for i, name in enumerate(head) if re.search(heads, name)]
    for cells in body:
        chosen = [cells[i] for i in numbers]
        own_unit = [cell for cell in chosen if re.search(r"\d ms, [\d.]+ GiB", cell)]
        for claim in own_unit or [", ".join(chosen)]:
            if figures := _figures(claim):
                yield f"{cells[0]}: {claim}", figures


def _figures(text: str) -> tuple[str, ...]:
    """The numbers of a claim: "1,094 ± 47 ms" has two."""
    text = re.sub(r"\([^)]*`[^)]*\)", "", text)
    return tuple(
        number for match in re.finditer(FIGURE, text) for number in match.groups() if number
    )


def row_of(claim: Claim, measured: list[Row]) -> Row | None:
    """The row that gives all figures of a claim, at a commit that the page names."""
    for row in measured:
        shown = {f"{value:,.{digits}f}" for value in row.values for digits in (0, 1, 2)}
        if row.commit in claim.section and set(claim.figures) <= shown:
            return row
    return None


def without_commit() -> list[str]:
    """Pages of results that name no commit."""
    pages = [ROOT / "docs" / "results.md", *(ROOT / "docs" / "results").glob("*.md")]
    named = r"\b(?=\w*\d)(?=\w*[a-f])[0-9a-f]{7,8}\b"
    return [path.name for path in pages if not re.search(named, path.read_text())]


def main() -> None:
    """Say every claim and its row."""
    measured = rows()
    for page in PAGES:
        for claim in claims(page):
            row = row_of(claim, measured)
            place = f"{row.place}, {row.commit}" if row else "NO ROW"
            sys.stdout.write(f"{page}: {claim.text}: {place}\n")


if __name__ == "__main__":
    main()
