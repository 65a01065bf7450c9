"""Ray Train with ZenFlow, as in the example: its workers resume after a failure, to the bit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.paths import ROOT
from tests.support.trainers import OVERLAPPED, STEPS, hf_run, losses_of, on_two_ranks

pytest.importorskip("ray.train")
pytest.importorskip("trl")

SECONDS = 500  # beside other work; Ray starts a dozen processes


@pytest.fixture
def environment() -> Iterator[dict[str, str]]:
    """Variables for a private Ray, whose sockets need a short path."""
    folder = tempfile.mkdtemp(prefix="dsext-ray-")
    here = {
        "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}",
        "RAY_TMPDIR": folder,
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    yield {**os.environ, **here}
    left = [
        process.name() for process in psutil.process_iter() if folder in " ".join(_command(process))
    ]
    shutil.rmtree(folder, ignore_errors=True)
    assert not left


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.parametrize("stage", [2])
@pytest.mark.timeout(2 * SECONDS)
def test_workers_resume_after_a_failure_to_the_bit(
    stage: int, environment: dict[str, str], tmp_path: Path
) -> None:
    output = tmp_path / "ray"
    command = [sys.executable, "-m", "tests.support.ray_runs", str(output), str(stage)]
    found = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        check=False,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert found.returncode == 0, (found.stdout + found.stderr)[-6000:]
    assert (output / "failed").exists()
    expected = on_two_ranks(hf_run, "trl_sft", tmp_path / "whole", stage, OVERLAPPED)[0]
    state = json.loads((output / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    assert losses_of(state["log_history"]) == expected
