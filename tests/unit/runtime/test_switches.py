"""Variables of the environment with a value that has no meaning are named."""

from __future__ import annotations

import logging

import pytest

from deepspeed_ext.runtime import log


@pytest.mark.parametrize(
    ("value", "off", "warned"),
    [(None, False, 0), ("", False, 0), ("1", False, 0), ("0", True, 0), ("no", False, 1)],
)
def test_only_0_is_off_and_no_other_word_passes_without_a_warning(
    value: str | None, off: bool, warned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(log, "warn_once", said.append)
    monkeypatch.delenv("DSEXT_BIND", raising=False)
    if value is not None:
        monkeypatch.setenv("DSEXT_BIND", value)
    assert log.is_off("DSEXT_BIND") == off
    assert said == ["DSEXT_BIND must be 0 or 1, got 'no'; it counts as 1"][:warned]


@pytest.mark.parametrize(
    ("value", "level", "warned"),
    [("", logging.INFO, False), ("debug", logging.DEBUG, False), ("loud", logging.INFO, True)],
)
def test_an_unknown_level_of_the_log_is_named(
    value: str,
    level: int,
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fresh = logging.Logger("fresh")
    monkeypatch.setattr(log, "logger", fresh)
    monkeypatch.setenv("DSEXT_LOG_LEVEL", value)
    log._configure()
    assert fresh.level == level
    assert ("got 'loud'; it counts as INFO" in capsys.readouterr().err) == warned
