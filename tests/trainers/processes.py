"""Processes of command lines: nothing that was started here is left."""

from __future__ import annotations

import ctypes
import time
from contextlib import suppress

import psutil

PR_SET_CHILD_SUBREAPER = 36
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
