"""The walk through the code: it names what is there, on the lines where it is, in ten files."""

from __future__ import annotations

import pytest

from tests.shape import budget
from tools import reading


def test_the_walk_names_what_is_there() -> None:
    text = reading.PAGE.read_text()
    assert reading.written(text) == text, "run `python -m tools.reading`"
    assert (len(reading.files(text)), budget.classes(reading.files(text))) <= (10, 45)


def test_what_is_gone_is_an_error() -> None:
    with pytest.raises(LookupError, match=r"engine.py has no Engine.nothing"):
        reading.written("[`Engine.nothing`](../../deepspeed_ext/adapter/engine.py#L1)")
