"""A silent wait shows life, and names what is compiled as soon as a compiler runs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deepspeed_ext.runtime import progress
from deepspeed_ext.runtime.progress import Progress, being_compiled


@contextmanager
def compiler(path: Path, folder: Path, *arguments: str) -> Iterator[None]:
    """A program called ``c++`` that works in `folder` until the end of the block."""
    path.write_text("#!/bin/sh\necho ready\nread line\n")
    path.chmod(0o755)
    process = subprocess.Popen(
        [path, *arguments], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    with process:
        yield


def test_an_operator_of_deepspeed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder = tmp_path / "fused_adam"
    folder.mkdir()
    with compiler(tmp_path / "c++", folder):
        assert being_compiled([os.getpid()]) == ["DeepSpeed's operator fused_adam"]
    assert being_compiled([os.getpid()]) == []


def test_other_sources_are_named_by_what_they_are_for(tmp_path: Path) -> None:
    with compiler(tmp_path / "c++", tmp_path, "/tmp/torchinductor_me/ab/cd.main.cpp"):
        assert being_compiled([os.getpid()]) == ["kernels of torch.compile"]
    with compiler(tmp_path / "c++", tmp_path, "-O3", "/src/adam_pass.cpp"):
        assert being_compiled([os.getpid()]) == ["adam_pass.cpp"]


def test_life_is_shown_every_few_seconds_and_a_compiler_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, compiled, told = 0.0, list[str](), list[str]()
    monkeypatch.setattr("time.monotonic", lambda: now)
    monkeypatch.setattr(progress, "being_compiled", lambda pids: compiled)
    waiting = Progress("training", list, told.append)
    for now in range(9):
        compiled = ["fused_adam"] if now == 7 else []
        waiting.look()
    assert told == ["training ... 5 s", "compiling fused_adam (minutes, once) ... 7 s"]


def test_how_far_it_is_is_asked_for_each_line(monkeypatch: pytest.MonkeyPatch) -> None:
    now, told = 0.0, list[str]()
    monkeypatch.setattr("time.monotonic", lambda: now)
    waiting = Progress(lambda: f"step {now:.0f} of 12", list, told.append)
    for now in range(12):  # noqa: B007 (read by the functions above)
        waiting.look()
    assert told == ["step 5 of 12 ... 5 s", "step 10 of 12 ... 10 s"]
