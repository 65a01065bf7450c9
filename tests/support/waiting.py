"""Waiting in tests: for something that happens, never for a time to pass."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import psutil

GENEROUS_SECONDS = 60.0
"""The one bound on what must happen soon, on machines that are busy with other tests."""


def wait_until(happened: Callable[[], bool], what: str) -> None:
    """Return as soon as `happened()` holds.

    Raises:
        AssertionError: it does not within `GENEROUS_SECONDS`.
    """
    deadline = time.monotonic() + GENEROUS_SECONDS
    while not happened():
        assert time.monotonic() < deadline, f"{what} did not happen within {GENEROUS_SECONDS:.0f} s"
        time.sleep(0.01)


def wait_to_be_killed(test: int | None = None) -> None:
    """For a process that its test kills: returns only once the test's own process has ended.

    Args:
        test: process id of the test; None: the parent of the calling process.
    """
    test = os.getppid() if test is None else test
    while psutil.pid_exists(test):
        time.sleep(0.1)
