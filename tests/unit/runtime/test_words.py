"""A number and its noun agree."""

from __future__ import annotations

import pytest

from deepspeed_ext.runtime.words import counted


@pytest.mark.parametrize(
    ("count", "told"), [(0, "0 groups"), (1, "1 group"), (2, "2 groups"), (1234, "1,234 groups")]
)
def test_a_noun_agrees_with_its_number(count: int, told: str) -> None:
    assert counted(count, "group") == told
