"""What containers often lack: a compiler, a cache, shared memory. Training goes on without."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ext.zenflow.worker.kernel.native import library_path
from tests.support.forked import run_forked
from tests.support.paths import ROOT

pytestmark = pytest.mark.cpu(
    reason="the simulated accelerator needs the compiler that is missing here"
)

TRAINER = "tests.unit.faults.lone_trainer"
TINY_DEV_SHM = [
    "unshare",
    "--mount",
    "sh",
    "-c",
    'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"',
    "sh",
]


def train(folder: Path, prefix: Sequence[str] = (), **environment: str) -> dict[str, Any]:
    """Run `lone_trainer` in `folder`; returns what it announced, and the lines that `prefix`
    printed."""
    done = subprocess.run(
        [*prefix, sys.executable, "-m", TRAINER, "destroy"],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return announced(done)


def announced(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith('{"worker"'))
    return {**json.loads(line), "lines": done.stdout.splitlines()}


@cache
def usual() -> dict[str, Any]:
    """The same on this machine as it is."""
    return announced(run_forked(TRAINER, "destroy", environment=os.environ))


@pytest.mark.full  # `make test-package` trains without a compiler, too
def test_without_compiler_and_caches(tmp_path: Path) -> None:
    """Nothing on PATH, an empty folder for DeepSpeed's operators and one for ours, no library built
    by setup.py.

    DeepSpeed's own communication cannot start on such a machine without an accelerator: it compiles
    an operator."""
    shutil.copytree(
        ROOT / "deepspeed_ext", tmp_path / "deepspeed_ext", ignore=shutil.ignore_patterns("*.so")
    )
    shutil.copytree(ROOT / "tests", tmp_path / "tests")
    empty = tmp_path / "empty"
    empty.mkdir()
    folders = {"PATH": str(empty), "CXX": "", "TORCH_EXTENSIONS_DIR": str(empty)}
    found = train(tmp_path, **folders)
    assert found["kernel"] == "reference"
    # equal to rounding, and then 16-bit weights
    assert found["losses"] == pytest.approx(usual()["losses"], rel=1e-2)
    assert not list(tmp_path.rglob("*.so"))


def test_with_a_dev_shm_of_one_mebibyte() -> None:
    """In a mount namespace of its own, so that what lies in /dev/shm afterwards is this run's."""
    allowed = subprocess.run([*TINY_DEV_SHM, "true"], capture_output=True, text=True, check=False)
    if allowed.returncode != 0:
        pytest.skip(f"needs the right to mount: {allowed.stderr.strip()}")
    look = ["sh", "-c", '"$@" && echo in /dev/shm: $(ls -A /dev/shm)', "sh"]
    found = train(ROOT, [*TINY_DEV_SHM, *look])
    assert found["losses"] == usual()["losses"]
    assert found["kernel"] == ("reference" if library_path() is None else "native")
    assert found["lines"][-1].rstrip() == "in /dev/shm:"
