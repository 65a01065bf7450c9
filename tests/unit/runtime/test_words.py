"""A number and its noun agree."""

from __future__ import annotations

import re

import pytest

from deepspeed_ext.runtime.words import counted
from tests.support.paths import ROOT


@pytest.mark.parametrize(
    ("count", "told"), [(0, "0 groups"), (1, "1 group"), (2, "2 groups"), (1234, "1,234 groups")]
)
def test_a_noun_agrees_with_its_number(count: int, told: str) -> None:
    assert counted(count, "group") == told


def test_no_message_leaves_the_plural_to_its_reader() -> None:
    found = [
        f"{path.name}: {line.strip()}"
        for folder in ("deepspeed_ext", "examples", "studies", "tests", "tools")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line in path.read_text().splitlines()
        if re.search(r"(\}|%d) [a-z]+\(s\)", line)
    ]
    assert found == []
