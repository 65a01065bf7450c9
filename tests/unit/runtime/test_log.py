"""Words of messages: a number and its noun agree, and what others wrote is short and one line; and
variables of the environment with a value that has no meaning are named."""

from __future__ import annotations

import logging
import re

import pytest

from deepspeed_ext.runtime import log
from deepspeed_ext.runtime.log import counted, one_line, quoted
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
