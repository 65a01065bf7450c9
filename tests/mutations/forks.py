"""Runs pytest in forks of a process that has imported torch and DeepSpeed once, each in a copy of
the repository."""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import psutil

from tests.support.paths import ROOT

__all__ = ["Fork", "Room", "import_once"]

COPIED = (
    "deepspeed_ext",
    "tests",
    "tools",
    "pyproject.toml",
    "examples",
    "configs",
    "docs",
    "README.md",
    "setup.py",
)
IMPORTED = (
    "pytest",
    "_pytest.pytester",
    "hypothesis.strategies",
    "coverage",
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor.parallel",
    "torch.onnx",
    "functorch.compile",
    "networkx",
    "deepspeed",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.zero.muon.muon_optimizer",
)
"""Nearly all that a test imports, without this package and its tests: a fork imports them from its
copy."""
MOST_BYTES = 6 << 30
"""Of memory that a process of a fork may allocate: some mutants never stop. Not of one with the
simulated accelerator, which reserves addresses."""
PR_SET_PDEATHSIG = 1
BACKENDS_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def import_once() -> None:
    """Import what the forks need; this process must stay without other threads."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TORCH_WARM_POOL": "0"}
    os.environ[BACKENDS_AUTOLOAD] = "0"  # with them torch would import the original of this package
    for name in IMPORTED:
        with suppress(ImportError):
            importlib.import_module(name)
    del os.environ[BACKENDS_AUTOLOAD]
    gc.collect()
    gc.freeze()
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads: a fork would lose all but one"
    assert "deepspeed_ext" not in sys.modules, "a fork would not import it from its copy"


class Room:
    """A copy of the repository, for one fork after the other.

    Attributes:
        path: the copy.
        failure: what the newest fork has written of its first failure.
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
        """The end of what the newest fork has printed."""
        return self._log.read_text(errors="replace")[-20_000:]

    def start(self, arguments: Sequence[str], lines: Path | None = None) -> Fork:
        """Run pytest in a fork; record lines in the folder `lines` if it is given."""
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir(parents=True)
        self.failure.unlink(missing_ok=True)
        pid = os.fork()
        if pid == 0:
            self._become(arguments, lines)
        return Fork(pid, time.monotonic())

    def _become(self, arguments: Sequence[str], lines: Path | None) -> NoReturn:
        status = 70
        try:
            os.setsid()
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, resource.RLIM_INFINITY))
            output = os.open(self._log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
            nothing = os.open(os.devnull, os.O_RDONLY)
            for stream, fd in enumerate((nothing, output, output)):
                os.dup2(fd, stream)
            self._move()
            status = _test(arguments, self.failure, lines)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _move(self) -> None:
        """Make this process one that runs in the copy, and has imported nothing of the
        repository."""
        import tempfile

        os.chdir(self.path)
        os.environ |= {
            "PYTHONPATH": str(self.path),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": str(self._temporary),
        }
        sys.dont_write_bytecode, tempfile.tempdir = True, None
        sys.path[:] = [
            str(self.path),
            *(entry for entry in sys.path if entry not in ("", str(ROOT))),
        ]
        for name in [
            name
            for name in sys.modules
            if name.partition(".")[0] in ("deepspeed_ext", "tests", "tools")
        ]:
            del sys.modules[name]
        importlib.invalidate_caches()


def _test(arguments: Sequence[str], failure: Path, lines: Path | None) -> int:
    import pytest

    inside = importlib.import_module("tests.mutations.inside")
    ranks = importlib.import_module("tests.support.ranks")
    inside.fork_ranks()
    plugins = [inside.FirstFailure(failure), *([inside.Lines(lines)] if lines else [])]
    try:
        return int(
            pytest.main(
                ["-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-seed=0", *arguments],
                plugins,
            )
        )
    finally:
        ranks.close_pools()


@dataclass
class Fork:
    """A fork that runs pytest.

    Attributes:
        begun: of `time.monotonic`.
        status: the exit status; None while it runs.
    """

    pid: int
    begun: float
    status: int | None = None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun

    def poll(self) -> int | None:
        """The exit status, or None while it runs."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status

    def end(self) -> None:
        """End it and all that it has started."""
        with suppress(psutil.NoSuchProcess):
            ours = psutil.Process(self.pid)
            for process in [*ours.children(recursive=True), ours]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        if self.status is None:
            self.status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
