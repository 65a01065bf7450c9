"""A silent wait shows life."""

from __future__ import annotations

import pytest

from tests.support.progress import Progress


def test_a_line_every_few_seconds_says_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now, told = 0.0, list[str]()
    monkeypatch.setattr("time.monotonic", lambda: now)
    waiting = Progress(lambda: f"step {now:.0f} of 12", told.append)
    for now in range(12):  # noqa: B007 (read by the functions above)
        waiting.look()
    assert told == ["step 5 of 12 ... 5 s", "step 10 of 12 ... 10 s"]
