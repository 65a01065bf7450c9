"""Processes of launchers: every wait is bounded, and nothing that was started here is left."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

PR_SET_CHILD_SUBREAPER = 36
START_SECONDS = 30.0
END_SECONDS = 10.0


def adopt_orphans() -> None:
    """Make this process the parent of all that its descendants leave behind, so that `end` finds
    it."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def descendants() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def require_none_left(before: set[psutil.Process]) -> None:
    """Wait until nothing runs that did not run `before`: daemons, too, end what they have started.

    Raises:
        AssertionError: something stays. It is killed.
    """
    deadline = time.monotonic() + END_SECONDS
    while (left := descendants() - before) and time.monotonic() < deadline:
        psutil.wait_procs(left, timeout=0.2)
    names = [shown(process) for process in left]
    end(left)
    assert not left, f"still running after the launcher has ended: {names}"


def shown(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return f"{process.pid} {' '.join(process.cmdline())[:100] or process.name()}"
    return f"{process.pid}"


def end(processes: set[psutil.Process]) -> None:
    """Kill `processes` and wait until they are gone."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    _, alive = psutil.wait_procs(processes, timeout=END_SECONDS)
    assert not alive, f"cannot end {alive}"


class Daemons:
    """Programs that run until `close`, with their output in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._before = descendants()
        self._started: list[tuple[str, subprocess.Popen[bytes]]] = []

    def start(self, name: str, *command: str, environment: Mapping[str, str] | None = None) -> None:
        with self._log(name).open("wb") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        self._started.append((name, process))

    def wait_for(self, happened: Callable[[], bool], what: str) -> None:
        """Return once `happened()`; an AssertionError with all output if a daemon has ended or it
        takes too long."""
        deadline = time.monotonic() + START_SECONDS
        while not happened():
            ended = [name for name, process in self._started if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                raise AssertionError(f"{what} did not come; ended: {ended}\n{self.output()}")
            time.sleep(0.1)

    def output(self) -> str:
        return "\n".join(
            f"--- {name}\n{self._log(name).read_text(errors='replace')[-3000:]}"
            for name, _ in self._started
        )

    def close(self) -> None:
        """End the daemons and all that they have started."""
        for _, process in reversed(self._started):
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGTERM)
        for _, process in reversed(self._started):
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
        end(descendants() - self._before)

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.out"


def free_ports(number: int) -> list[int]:
    """Different ports that are free now, below those that Linux hands out by itself."""
    found: list[int] = []
    for port in range(20_000 + os.getpid() % 5_000, 32_768):
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            found.append(port)
        if len(found) == number:
            return found
    raise AssertionError("found no free ports")


def answers(host: str, port: int) -> bool:
    """Whether something listens there."""
    with suppress(OSError), socket.create_connection((host, port), timeout=1.0):
        return True
    return False
