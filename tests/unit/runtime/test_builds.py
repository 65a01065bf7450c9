"""A start that waits for the lock of a killed build of one of DeepSpeed's operators says so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deepspeed_ext.adapter import upstream
from deepspeed_ext.adapter.upstream import OpBuilder, announced_builds, swapped


def test_the_lock_of_a_killed_build_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(upstream.logger, "warning", said.append)
    monkeypatch.setattr(OpBuilder, "jit_load", lambda self, verbose: f"loaded {verbose}")
    monkeypatch.setattr("torch.utils.cpp_extension.FileBaton", object, raising=False)
    builder = type("Builder", (OpBuilder,), {"__init__": lambda self: None, "name": "an_adam"})
    monkeypatch.setattr(builder, "__abstractmethods__", frozenset())
    locks = [tmp_path / name / "lock" for name in ("an_adam", "another")]
    for lock in locks:
        lock.parent.mkdir()
        lock.touch()
    with swapped(announced_builds()):
        assert builder().jit_load() == "loaded False"
        assert said == [], "the locks are young"
        for lock in locks:
            os.utime(lock, (0, 0))
        assert builder().jit_load() == "loaded False"
    (line,) = said
    assert line.startswith(f"waiting for the lock {locks[0]}, ")
    assert "minutes old" in line
