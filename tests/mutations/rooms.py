"""Runs pytest in copies of the repository, one run after the other in each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from tests.mutations.inside import FAILURE, LINES
from tests.support.paths import ROOT

__all__ = ["Room", "Run"]

COPIED = (
    "deepspeed_ext",
    "tests",
    "tools",
    "pyproject.toml",
    "examples",
    "studies",
    "configs",
    "docs",
    "README.md",
    "setup.py",
)


class Room:
    """A copy of the repository.

    Attributes:
        path: the copy.
        failure: what the newest run has written of its first failure.
    """

    def __init__(self, folder: Path) -> None:
        self.path, self._temporary, self.failure = folder / "r", folder / "t", folder / "failure"
        self._log = folder / "log"
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            copy(ROOT / name, self.path / name)

    @property
    def log(self) -> str:
        """The end of what the newest run has printed."""
        return self._log.read_text(errors="replace")[-20_000:]

    def start(self, arguments: Sequence[str], lines: Path | None = None) -> Run:
        """Begin to run pytest; record lines in the folder `lines` if it is given."""
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir(parents=True)
        self.failure.unlink(missing_ok=True)
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.path),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": str(self._temporary),
            "OMP_NUM_THREADS": "1",
            FAILURE: str(self.failure),
            LINES: str(lines or ""),
        }
        plugins = ["no:cacheprovider", "no:xdist", "tests.mutations.inside"]
        command = [sys.executable, "-m", "pytest", "--hypothesis-seed=0"]
        command += [word for plugin in plugins for word in ("-p", plugin)]
        with self._log.open("wb") as log:
            process = subprocess.Popen(
                [*command, *arguments],
                cwd=self.path,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Run(process)


class Run:
    """A run of pytest."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process, self._begun = process, time.monotonic()

    @property
    def seconds(self) -> float:
        """Since its start."""
        return time.monotonic() - self._begun

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        return self._process.poll()

    def end(self) -> int:
        """End it and all that it has started; its exit status."""
        with suppress(psutil.NoSuchProcess):
            ours = psutil.Process(self._process.pid)
            for process in [*ours.children(recursive=True), ours]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        return self._process.wait()
