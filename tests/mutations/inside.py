"""A plugin of pytest in a run of the campaign: it notes the first failure, and records lines."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import coverage
import pytest

from tests.support import ranks
from tests.support.rank_nursery import Nursery

__all__ = ["FAILURE", "LINES"]

FAILURE, LINES = "DSEXT_MUTANT_FAILURE", "DSEXT_MUTANT_LINES"
"""Variables: the file for the name of the first failure, and the folder for lines, or none."""

MOST_BYTES = 6 << 30
"""Of memory that a process of a run may allocate: some mutants never stop."""
PR_SET_PDEATHSIG = 1


class FirstFailure:
    """Writes the name of the first test that fails into a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self._path.exists():
            self._path.write_text(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self._path.exists():
            self._path.write_text(f"{report.nodeid} (collecting)")


class Lines:
    """Writes, for each test that passes, how long it takes, whether it has ranks, and which lines
    it runs.

    Attributes:
        folder: one file for each test, and for each body that a rank has run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._test, self._has_ranks, self._passed = "", False, False
        self._coverage = _coverage()
        run = ranks.RankPool.run

        def recorded_run(
            pool: Any, body: Callable[..., Any], args: tuple, kwargs: dict, *seconds: float
        ) -> Any:
            self._has_ranks = True
            name = (body.__module__, body.__qualname__)
            slower = [3 * each for each in seconds]
            return run(pool, recorded, (str(folder), self._test, name, args, kwargs), {}, *slower)

        ranks.RankPool.run = recorded_run  # type: ignore[method-assign, assignment]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._test, self._has_ranks = item.nodeid, False
        self._coverage.erase()
        self._coverage.start()
        begin = time.monotonic()
        try:
            return (yield)
        finally:
            seconds = time.monotonic() - begin
            self._coverage.stop()
            if self._passed:
                about = {"seconds": seconds, "has_ranks": self._has_ranks}
                _write(self._folder, item.nodeid, self._coverage, about)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self._passed = report.passed
        elif report.when == "setup" or report.failed:
            self._passed = False


def recorded(folder: str, test: str, name: tuple[str, str], args: tuple, kwargs: dict) -> Any:
    """The body of a rank, which it runs with its lines recorded."""
    body: Any = import_module(name[0])
    for part in name[1].split("."):
        body = getattr(body, part)
    here = _coverage()
    here.start()
    try:
        return body(*args, **kwargs)
    finally:
        here.stop()
        _write(Path(folder), test, here, {})


def _coverage() -> coverage.Coverage:
    return coverage.Coverage(data_file=None, config_file=False, include=["*/deepspeed_ext/*"])


def _write(folder: Path, test: str, found: coverage.Coverage, about: dict[str, Any]) -> None:
    data = found.get_data()
    lines = {
        path.rpartition("/deepspeed_ext/")[2]: sorted(data.lines(path) or ())
        for path in data.measured_files()
    }
    (folder / f"{uuid.uuid4().hex}.json").write_text(
        json.dumps({"test": test, "lines": lines, **about})
    )


class _UnlimitedNursery(Nursery):
    """Without that limit for the simulated accelerator, which reserves addresses."""

    def __init__(self, device: str = "cpu") -> None:
        limits = resource.getrlimit(resource.RLIMIT_DATA)
        if device != "cpu":
            resource.setrlimit(resource.RLIMIT_DATA, (limits[1], limits[1]))
        super().__init__(device)
        resource.setrlimit(resource.RLIMIT_DATA, limits)


def pytest_configure(config: pytest.Config) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, resource.RLIM_INFINITY))
    ranks.Nursery = _UnlimitedNursery  # type: ignore[misc]
    config.pluginmanager.register(FirstFailure(Path(os.environ[FAILURE])))
    if folder := os.environ[LINES]:
        config.pluginmanager.register(Lines(Path(folder)))
