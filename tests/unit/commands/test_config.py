"""``deepspeed-ext config``: the ready configs, also of a checkout."""

from __future__ import annotations

import json

import pytest

from deepspeed_ext.commands import main as cli
from tests.support.paths import ROOT

READY = sorted(path.stem for path in (ROOT / "configs").glob("*.json"))


def test_the_list_has_every_config_and_each_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config"]) == 0
    _, *names = capsys.readouterr().out.split("\n  ")
    assert [name.strip() for name in names] == READY
    for name in READY:
        assert cli.main(["config", name]) == 0
        assert json.loads(capsys.readouterr().out) == json.loads(
            (ROOT / f"configs/{name}.json").read_text()
        )


def test_another_name_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "zneflow"]) == 2
    assert "expected one of hf, hf_zenflow" in capsys.readouterr().err
