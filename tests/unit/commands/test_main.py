"""The command line itself: what becomes of its output."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from deepspeed_ext.commands import main as command_line

COMMANDS = [
    ("plan", "--memory", "--params", "7e9", "--ranks", "8"),
    ("plan", "--memory", "--params", "7e9", "--ranks", "8", "--json"),
    ("config", "trainer_zenflow"),
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_reader_that_has_read_enough_is_no_error(words: tuple[str, ...]) -> None:
    """As ``| head`` does. Not one word of Python is printed for it."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        command = [sys.executable, "-m", "deepspeed_ext.commands.main", *words]
        done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False, timeout=120)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (command_line.EXIT_UNREAD, "")


def test_a_pipe_that_breaks_elsewhere_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: object) -> int:
        raise BrokenPipeError("a process that measures has ended")

    monkeypatch.setattr(command_line, "_config", fail)
    assert command_line.main(["config", "trainer_zenflow"]) == command_line.EXIT_PROBLEM
    assert capfd.readouterr().err == "deepspeed-ext config: error: a process that measures has ended\n"
