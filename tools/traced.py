"""Lists the figures of README and the results that no stored measurement gives.

    python -m tools.traced      # must say nothing but what stands in BY_HAND, with the reason

Every line of a table with figures is looked at, and in the sentences of the first pages
every figure with a unit. Rows of steps on a GPU are traced by tools.figures, all others by
tools.derived; some tables are written by `make docs` or by the study of numerics.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import NamedTuple

from tools import derived, figures
from tools.architecture import ROOT

__all__ = ["BY_HAND", "Line", "lines", "untraced"]

WRITTEN = "<!-- fits: written by `make docs` -->", "<!-- begin: "
"""Before tables that a command computes; tests compare them."""
PRINTED = "the command printed it at that commit, which stored no rows"
BY_HAND: dict[str, dict[str, str]] = {
    "docs/README.md": {"30 minutes": "a title"},
    "docs/results.md": {
        "126 GiB": "the machine",
        "119 GiB": "the plan at that commit",
        "520 ms": "arithmetic",
        "460 ms": "arithmetic",
        "250 ms": "what was simulated",
        "1 %": "the limit of a verdict, and of a plan",
        "2 %": "tests/unit/commands/memory/test_measured.py holds it",
        "12 GiB": "arithmetic: measured less planned, of results/gpu.md",
        "9 to 13 times": "of results/cpu_adam.md, Without the library",
        "3 times": "of results/cpu_adam.md, Without AVX-512",
        "1.24 times": PRINTED,
    },
    "docs/results/cpu_adam.md": {
        "Instruction sets": PRINTED,
        "AVX-512 on a quiet EPYC": PRINTED,
        "Without AVX-512": PRINTED,
    },
    "docs/results/gather.md": {"Threshold for small parameters": PRINTED},
    "docs/results/gpu.md": {"Beside the plan": "planned at that commit; measured: Step, above it"},
    "docs/results/soak.md": {"Soak: faults at random times": "tests.soak.run writes the page"},
    "docs/results/trainers.md": {"Command lines": "versions; the tests print the seconds"},
    "docs/results/versions.md": {
        "Hardware": "names",
        "DeepSpeed": "numbers of passed tests",
        "DeepSpeed's own tests": "numbers of passed tests",
    },
    "docs/results/zenflow_step.md": {
        "| any | exact without peeks, computed |": "arithmetic",
        "| predictive, interval 1 |": PRINTED,
        "Beside the commit before the package was halved": "two commits; the page has the command",
    },
}
"""What no stored row gives, by page: a figure, a heading or the begin of a line, and why."""
UNIT = re.compile(
    r"(?<![\w.,+-])[+-]?\d(?:[\d.,]*\d)?(?:(?: to | and )\d(?:[\d.,]*\d)?)* "
    r"(?:%|ms|s|GiB|GB/s|times|points|bytes|minutes)(?!\w)"
)
SENTENCES = ("README.md", "docs/README.md", "docs/which.md", "docs/results.md")


class Line(NamedTuple):
    """A line of a table."""

    page: str
    heading: str
    head: str
    text: str


def pages() -> list[str]:
    """The first pages and the results."""
    found = sorted((ROOT / "docs" / "results").glob("*.md"))
    return [*SENTENCES, *(path.relative_to(ROOT).as_posix() for path in found)]


def lines(page: str, text: str) -> Iterator[Line]:
    """Lines with figures of all tables of a page but those that a command writes."""
    heading, head, is_written, in_body = "", "", False, False
    for line in text.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if line.startswith(WRITTEN):
            is_written = True
        elif not line.startswith("|"):
            is_written, in_body = is_written and in_body is False, False
        elif set(line) <= set("|-: "):
            in_body = True
        elif not in_body:
            head = line
        elif not is_written and re.search(r"(?<![\w-])\d[\d.,]*(?!-bit| bits|\w)", line):
            yield Line(page, heading, head, derived.plain(line))


def untraced(page: str, text: str | None = None) -> list[str]:
    """Lines of tables, and figures of sentences, that neither stored rows give nor `BY_HAND`
    explains; `text` stands for the page's own."""
    text = (ROOT / page).read_text() if text is None else text
    rows = figures.rows()
    said = [derived.plain(words) for where, words in derived.said() if where == page]
    by_hand, sections = BY_HAND.get(page, {}), figures.PAGES.get(page)
    found = [
        f"{line.heading}: {line.text}"
        for line in lines(page, text)
        if not any(words in line.text for words in said)
        and not (_has_steps(line, sections) and _is_step(line, text, rows))
        and line.heading not in by_hand
        and not any(line.text.startswith(begin) for begin in by_hand)
    ]
    found += [
        f"not there, but by hand: {what}" for what in by_hand if what not in derived.plain(text)
    ]
    if page in SENTENCES:
        claims = (claim for claim in figures.claims(page, text) if figures.row_of(claim, rows))
        known = " ; ".join((*said, *(claim.text for claim in claims), *by_hand))
        found += [each for each in _sentences(text) if not _has(known, each)]
    return found


def _has_steps(line: Line, sections: tuple[str, ...] | None) -> bool:
    return sections is not None and (not sections or line.heading in sections)


def _sentences(text: str) -> Iterator[str]:
    """Figures with their units."""
    text = re.sub(r"```.*?```|`[^`]*`|!\[[^]]*\]", "", text, flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    for block in text.split("\n\n"):
        prose = " ".join(line for line in block.splitlines() if not line.startswith("|"))
        yield from UNIT.findall(derived.plain(prose))


def _has(known: str, figure: str) -> bool:
    return re.search(rf"(?<![\d.]){re.escape(figure)}", known) is not None


def _is_step(line: Line, text: str, rows: list[figures.Row]) -> bool:
    table = [line.head, "", line.text]
    claims = [figures.Claim(line.page, *claim, text) for claim in figures.of_table(table)]
    return bool(claims) and all(figures.row_of(claim, rows) for claim in claims)


def main() -> None:
    """Say what was not traced, and what stands by hand."""
    for page in pages():
        for found in untraced(page):
            sys.stdout.write(f"{page}: NOT TRACED: {found}\n")
        for what, why in BY_HAND.get(page, {}).items():
            sys.stdout.write(f"{page}: by hand: {what}: {why}\n")


if __name__ == "__main__":
    main()
