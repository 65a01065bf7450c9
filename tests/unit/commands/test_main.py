"""The command line itself: what becomes of its output; and the ready configs."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from unittest.mock import Mock

import pytest

from deepspeed_ext.commands import main as command_line
from deepspeed_ext.commands.main import COMMANDS
from tests.support.pages import check_command
from tests.support.paths import ROOT

LINES = [
    ("plan", "--memory", "--params", "7e9", "--ranks", "8"),
    ("plan", "--memory", "--params", "7e9", "--ranks", "8", "--json"),
    ("config", "trainer_zenflow"),
]


@pytest.mark.parametrize("words", LINES, ids=" ".join)
def test_a_reader_that_has_read_enough_is_no_error(words: tuple[str, ...]) -> None:
    """As ``| head`` does. Not one word of Python is printed for it."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command = [sys.executable, "-m", "deepspeed_ext.commands.main", *words]
        done = subprocess.run(
            command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False, timeout=120
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (command_line.EXIT_UNREAD, "")


def test_a_module_that_is_not_installed_is_one_line_and_a_mistake_of_ours_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: object) -> int:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(command_line, "_verify", fail)
    name = "deepspeed.comm"
    words = ["verify", "--config", "ds.json"]
    assert command_line.main(words) == command_line.EXIT_PROBLEM
    assert capsys.readouterr().err == (
        f"deepspeed-ext verify: error: No module named 'deepspeed.comm' of {sys.executable}: "
        "install it there; deepspeed-ext doctor shows what else is missing\n"
    )
    name = "deepspeed_ext.nothing"
    with pytest.raises(ModuleNotFoundError):
        command_line.main(words)


def test_ctrl_c_ends_a_command_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command_line, "_doctor", Mock(side_effect=KeyboardInterrupt))
    assert command_line.main(["doctor"]) == 130
    assert capsys.readouterr().err == ""


def test_every_command_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line.main(["--help"])
    usage = " ".join(capsys.readouterr().out.partition("\n\n")[0].split())
    listed = usage.partition("[--version] ")[2].removesuffix(" ...").split(" | ")
    assert listed == list(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_ends_with_an_example_that_it_reads(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        command_line.main([name, "--help"])
    example = COMMANDS[name].example
    assert capsys.readouterr().out.rstrip().endswith(f"example: {example}")
    check_command(shlex.split(example.partition(" > ")[0]))


# -- ``config`` ------------------------------------------------------------------------------------

READY = sorted(path.stem for path in (ROOT / "configs").glob("*.json"))


def test_the_list_has_every_config_and_each_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["config"]) == 0
    _, *names = capsys.readouterr().out.split("\n  ")
    assert [name.strip() for name in names] == READY
    for name in READY:
        assert command_line.main(["config", name]) == 0
        assert json.loads(capsys.readouterr().out) == json.loads(
            (ROOT / f"configs/{name}.json").read_text()
        )


def test_another_name_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["config", "zneflow"]) == 2
    assert "expected one of hf, hf_zenflow" in capsys.readouterr().err
