"""Every test marked gpu is collected and called without a GPU: its body exists and accepts its arguments."""

from __future__ import annotations

import importlib
import inspect
import os
import pickle
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import reduce
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch

from tests.support import ranks
from tests.support.paths import ROOT


class UnfitError(Exception):
    """A body does not exist or does not take its arguments."""


class Resolver:
    """A plugin that checks every call of `run_ranks` instead of making it.

    Attributes:
        reports: outcome of each test, by its name.
        bodies: qualified names of the bodies that were called.
    """

    def __init__(self) -> None:
        self.reports: dict[str, str] = {}
        self.bodies: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool:
        called: list[str] = []

        def resolve(
            world_size: int,
            body: Callable[..., Any],
            *args: Any,
            device: str = "cpu",
            pool: str = "",
            timeout_seconds: float = 0.0,
            **kwargs: Any,
        ) -> list[Any]:
            try:
                found = reduce(getattr, body.__qualname__.split("."), importlib.import_module(body.__module__))
                inspect.signature(body).bind(*args, **kwargs)
                pickle.dumps((args, kwargs))
            except Exception as error:
                raise UnfitError(f"{body}: {error}") from error
            if found is not body or device != "accelerator":
                raise UnfitError(f"{body} on the device {device!r}")
            called.append(f"{body.__module__}.{body.__qualname__}")
            return [MagicMock() for _ in range(world_size)]

        arguments = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
        real = ranks.run_ranks
        with ExitStack() as stack:
            for name, module in list(sys.modules.items()):
                if name.startswith("tests.") and vars(module).get("run_ranks") is real:
                    stack.enter_context(patch.object(module, "run_ranks", resolve))
            try:
                pyfuncitem.obj(**arguments)
            except (AssertionError, TypeError, ValueError):  # the results are no results
                if not called:
                    raise
        if not called:
            raise UnfitError("no body was called")
        self.bodies.update(called)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self.reports[report.nodeid] = report.outcome if report.passed else str(report.longrepr)


def test_every_gpu_test_calls_a_body_that_accepts_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)  # or they would be skipped
    resolver = Resolver()
    files = [str(path) for path in ROOT.glob("tests/unit/**/test_*.py") if "pytest.mark.gpu" in path.read_text()]
    arguments = ["-m", "gpu", "--full", "-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:terminal"]
    arguments += ["-p", "no:faulthandler"]  # it belongs to the session around this one
    with patch.dict(os.environ):  # where pytest notes which test is running
        assert pytest.main([*arguments, "--rootdir", str(ROOT), *files], plugins=[resolver]) in (0, 1)
    broken = {name: text for name, text in resolver.reports.items() if text != "passed"}
    assert not broken, "\n".join(f"{name}\n{text}" for name, text in broken.items())
    assert len(resolver.reports) > 100
    assert len(resolver.bodies) > 10
