"""A rank killed at any system call of a save leaves one whole checkpoint, old or new, and the next
save works."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

SOURCE = ROOT / "tests" / "support" / "crash" / "interpose.cpp"


@pytest.fixture(scope="module")
def interposer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    library = tmp_path_factory.mktemp("interpose") / "libinterpose.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", str(SOURCE), "-o", str(library), "-ldl"], check=True
    )
    return library


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("size", "every"),
    [(2, 193), *(pytest.param(size, 1, marks=pytest.mark.full) for size in (2, 3))],
)
def test_kill_at_every_system_call(interposer: Path, size: int, every: int, tmp_path: Path) -> None:
    """New and reused tag, one disk and one per rank, a save that waits and one beside training,
    every victim, every call that changes a file."""
    command = [
        sys.executable,
        "-m",
        "tests.support.crash.driver",
        str(tmp_path),
        str(size),
        str(every),
    ]
    environment = {**os.environ, "LD_PRELOAD": str(interposer), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command,
        check=False,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=3500 if every == 1 else 280,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["wrong"] == []
    assert found["crashes"] > 100 // every
