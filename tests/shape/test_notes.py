"""A titled note stands once, and every citation of a note names one that exists."""

from __future__ import annotations

import re
from collections import Counter

from tools import architecture

CITED = re.compile(r"(?:see |\()Note:\s(?:#\s*)?\[([^\]]+)\]")
TITLED = re.compile(r"^\s*(?:#|//)?\s*Note: \[([^\]]+)\]", re.MULTILINE)


def joined(text: str) -> str:
    """The text with one space for every break between two lines of a comment or docstring."""
    return re.sub(r"\s*\n\s*(?:#|//)?\s*", " ", text)


def test_every_note_stands_once_and_every_citation_finds_one() -> None:
    titles: Counter[str] = Counter()
    cited: set[str] = set()
    for path in sorted(architecture.PACKAGE.rglob("*")):
        if path.suffix in (".py", ".cpp", ".h"):
            text = path.read_text()
            titles.update(TITLED.findall(text))
            cited |= set(CITED.findall(joined(text)))
    assert len(titles) >= 10
    assert {title: times for title, times in titles.items() if times > 1} == {}
    assert cited
    assert cited <= set(titles)
