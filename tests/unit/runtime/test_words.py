"""Words of messages: a number and its noun agree, and what others wrote is short and one line."""

from __future__ import annotations

import re

import pytest

from deepspeed_ext.runtime.words import counted, one_line, quoted
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


def test_what_a_user_wrote_is_quoted_and_cut() -> None:
    assert quoted("7B") == "'7B'"
    assert quoted("x" * 41) == f"'{'x' * 40}...'"


def test_an_error_is_one_line() -> None:
    assert one_line(ValueError("a\n  b")) == "ValueError: a b"
