"""Builds of DeepSpeed's operators are announced by name, and show that they go on."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

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
    found, log = load(monkeypatch, lines=3)
    assert found == "verbose=False"  # torch's own lines, which every rank would print
    assert log[0].startswith("compiling DeepSpeed's operator slow")
    assert log[1].startswith("still compiling DeepSpeed's operator slow")
    assert log[-1].startswith("DeepSpeed's operator slow is ready")


def test_a_load_of_what_is_compiled_is_silent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "slow.so").touch()
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
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(builds.build_locks, "abandoned", lambda: [tmp_path / "slow" / "lock"])
    _, log = load(monkeypatch, lines=2)
    assert f"waiting for the lock {tmp_path / 'slow' / 'lock'}" in log[1]
