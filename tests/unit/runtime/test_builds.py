"""Builds of DeepSpeed's operators are announced by name, and show that they go on."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
from deepspeed.ops.op_builder.builder import OpBuilder

from deepspeed_ext.adapter import upstream as _upstream
from deepspeed_ext.runtime import builds
from tests.support.log import heard


class Builder:
    """As DeepSpeed's, of an operator `slow`, whose compiler runs until something was logged often
    enough."""

    name = "slow"

    def __init__(self, log: list[tuple[str, str]], lines: int) -> None:
        self._log, self._lines = log, lines

    def compile(self, verbose: bool) -> str:
        for _ in range(3000):
            if len(self._log) >= self._lines:
                break
            threading.Event().wait(0.01)
        return f"verbose={verbose}"


def load(monkeypatch: pytest.MonkeyPatch, lines: int) -> tuple[Any, list[str]]:
    monkeypatch.setattr(builds, "FIRST_SECONDS", 0.01)
    monkeypatch.setattr(builds, "EVERY_SECONDS", 0.01)
    monkeypatch.setattr(OpBuilder, "jit_load", Builder.compile)
    with heard() as log, _upstream.swapped(_upstream.announced_builds()):
        found = OpBuilder.jit_load(Builder(log, lines), True)
    return found, [text for _, text in log]


def test_a_build_says_what_it_compiles_and_that_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    found, log = load(monkeypatch, lines=2)
    assert found == "verbose=False"  # torch's own lines, which every rank would print
    *during, after = log
    assert len(during) >= 2
    assert all(line.startswith("compiling DeepSpeed's operator slow") for line in during)
    assert after.startswith("DeepSpeed's operator slow is ready")


def test_a_load_of_what_is_compiled_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Builder, "compile", lambda self, verbose: "loaded")
    monkeypatch.setattr(builds, "_report", lambda *args: None)
    monkeypatch.setattr(builds.time, "monotonic", lambda: 0.0)
    assert load(monkeypatch, lines=0) == ("loaded", [])


def test_only_the_first_rank_of_a_host_announces(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert load(monkeypatch, lines=0)[1] == []


def test_who_waits_for_a_killed_build_is_told_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(builds, "waits_for_files", lambda: True)
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    for operator in ("another", "slow"):
        lock = tmp_path / "py311_cpu" / operator / "lock"
        lock.parent.mkdir(parents=True)
        lock.touch()
        os.utime(lock, (0, 0))
    _, (told, *_) = load(monkeypatch, lines=1)
    assert f"waiting for the lock {lock}" in told


@pytest.mark.parametrize("error", [PermissionError("denied"), psutil.AccessDenied(1)])
def test_a_host_that_cannot_be_read_starts_all_the_same(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builds, "waits_for_files", lambda: True)
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where torch then compiles
    lock = tmp_path / "torch_extensions/cpu_adam/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (0, 0))
    assert builds.abandoned_locks() == [lock]

    def refused(*_: object) -> None:
        raise error

    monkeypatch.setattr(psutil, "process_iter", refused)
    assert builds.abandoned_locks() == []
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)  # a container's user without an entry
    assert builds.abandoned_locks() == []


def test_this_torch_locks_in_one_of_the_two_ways() -> None:
    from torch.utils import cpp_extension

    assert builds.waits_for_files() == (not hasattr(cpp_extension, "FileLock"))
