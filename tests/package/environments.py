"""Runs commands, and makes environments, as if this checkout were not there."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

PYTHONS = [f"python3.{minor}" for minor in range(10, 15)]
SECONDS = 1500
"""Of a command: torch is several gigabytes with its libraries for GPUs."""

OF_THE_CHECKOUT = ("PYTHON", "DSEXT_", "DS_", "TORCH_EXTENSIONS_DIR")
LIBRARY = "deepspeed_ext/zenflow/worker/kernel/_adam_pass.so"


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """What a command prints, in an environment without this checkout: also without the operators
    that DeepSpeed has compiled for it, for which another torch would wait, or which it would
    compile anew."""
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith(OF_THE_CHECKOUT)
    }
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**variables, **environment},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, (
        f"{command}: exit status {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    )
    return done.stdout + done.stderr


def environment_of(python: str, folder: Path, *install: str | Path) -> Path:
    """The interpreter of a new, empty environment with what is installed."""
    run(python, "-m", "venv", folder, cwd=folder.parent)
    run(folder / "bin/python", "-m", "pip", "install", "--quiet", *install, cwd=folder.parent)
    return folder / "bin/python"


def interpreter_of(name: str) -> str:
    """The program of a Python, on PATH or of pyenv; skips the test if it is not here."""
    version = name.removeprefix("python")
    ours = [str(path) for path in Path.home().glob(f".pyenv/versions/{version}.*/bin/{name}")]
    # on PATH may be a shim of pyenv, which fails unless the version is enabled
    for found in (shutil.which(name), *ours):
        if (
            found
            and subprocess.run([found, "--version"], capture_output=True, check=False).returncode
            == 0
        ):
            return found
    pytest.skip(f"no {name} here")
