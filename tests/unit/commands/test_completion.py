"""The printed script completes commands, options and their values in a real bash and a real zsh."""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed_ext.commands.completion import SHELLS
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "getting_started.md"
START = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"]}
SHOW = "deepspeed-ext() { printf 'got%s\\n' \"$(printf ' <%s>' \"$@\")\"; }"
"""In place of the program, once the script is there: says with which words it was called."""


def typed(shell: str, keys: list[str], folder: Path) -> list[list[str]]:
    """The words of each command line that is typed, after the line of the page that switches
    completion on."""
    if shutil.which(shell) is None:
        pytest.skip(f"not installed: {shell}")
    program = folder / "deepspeed-ext"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m deepspeed_ext.commands.main "$@"\n')
    program.chmod(0o755)
    (line,) = re.findall(rf"`(source <\(deepspeed-ext completion {shell}\))`", PAGE.read_text())
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    environment |= {
        "ZDOTDIR": str(folder),
        "HOME": str(folder),
        "TERM": "dumb",
        "PS1": "",
        "COLUMNS": "1000",
    }
    keyboard, terminal = pty.openpty()
    try:
        process = subprocess.Popen(
            START[shell],
            stdin=terminal,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment,
        )
        os.write(keyboard, "\n".join([line, SHOW, *keys, "exit", ""]).encode())
        output, _ = process.communicate(timeout=120)
    finally:
        os.close(keyboard)
        os.close(terminal)
    said = re.findall(r"^got (.*)$", output.decode().replace("\r", ""), re.MULTILINE)
    return [re.findall(r"<(.*?)>", words) for words in said]


@pytest.mark.parametrize("shell", SHELLS)
def test_the_tab_key_completes_commands_options_values_and_files(
    shell: str, tmp_path: Path
) -> None:
    (tmp_path / "of_mine.json").touch()
    keys = {
        "deepspeed-ext ver\t --conf\t of_m\t": ["verify", "--config", "of_mine.json"],
        "deepspeed-ext plan --mem\t --dtype f\t3\t": ["plan", "--memory", "--dtype", "fp32"],
        "deepspeed-ext config trainer\t": ["config", "trainer_zenflow"],
        "deepspeed-ext run of\t": ["run", "of_mine.json"],
        "deepspeed-ext completion z\t": ["completion", "zsh"],
    }
    assert typed(shell, list(keys), tmp_path) == list(keys.values())
