"""The main job: resumes to the bit, equals upstream, and ends with one clear error on a wrong command line."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import pytest

from deepspeed_ext.zenflow.rules.predictive import schedule
from tests.support.paths import ROOT
from tests.support.ranks import run_ranks

MODEL = ["--dim", "32", "--layers", "2", "--heads", "2", "--seq-len", "32"]
SMALL = [*MODEL, "--batch-size", "2", "--grad-accum", "2", "--steps", "6", "--sample-bytes", "8"]


def train(folder: str, *flags: str) -> float:
    """Run the example on this rank; returns the held-out loss."""
    if str(ROOT / "examples") not in sys.path:
        sys.path.insert(0, str(ROOT / "examples"))
    import train as example

    return example.run(example.parse_args([*SMALL, "--output", folder, *flags]))


def output_of(*flags: str) -> tuple[str, set[str]]:
    if str(ROOT / "examples") not in sys.path:
        sys.path.insert(0, str(ROOT / "examples"))
    import train as example

    args = example.parse_args([*flags])
    return args.output.name, set(example.load_config(args)["zero_optimization"])


def test_upstream_overwrites_no_other_run() -> None:
    assert run_ranks(1, output_of) == [("zenflow", {"stage", "zenflow"})]
    assert run_ranks(1, output_of, "--upstream") == [("zenflow-upstream", {"stage"})]


def losses(folder: Path) -> list[tuple[int, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [(line["step"], line["loss"]) for line in map(json.loads, lines)]


@pytest.mark.parametrize(
    "mode",
    # flatten/test_parity.py covers stages 1 and 2, gather/test_parity.py upstream's way at stage 3
    [
        "zero3_single_gather",
        *(pytest.param(mode, marks=pytest.mark.full) for mode in ("zero1", "zero2", "zero3", "offload")),
    ],
)
def test_resumed_run_equals_uninterrupted_and_upstream(mode: str, tmp_path: Path) -> None:
    mode_flag = ("--mode", mode)
    held_out = run_ranks(2, train, str(tmp_path / "whole"), *mode_flag)
    run_ranks(2, train, str(tmp_path / "parts"), *mode_flag, "--stop-after", "3")
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 3, "loss": 99.0}\n')  # a step that was trained but not saved
    held_out_resumed = run_ranks(2, train, str(tmp_path / "parts"), *mode_flag, "--resume")
    held_out_upstream = run_ranks(2, train, str(tmp_path / "upstream"), *mode_flag, "--upstream")

    whole = losses(tmp_path / "whole")
    assert [step for step, _ in whole] == list(range(6))
    assert whole == losses(tmp_path / "parts") == losses(tmp_path / "upstream")
    assert held_out == held_out_resumed == held_out_upstream
    assert whole[-1][1] < whole[0][1]


def train_overlapped(folder: str, *flags: str) -> float:
    """As `train`, whose six steps would all be synchronous by default."""
    with patch.object(schedule, "WARM_UP_STEPS", 1):
        return train(folder, *flags)


@pytest.mark.parametrize("mode", ["zenflow", pytest.param("zenflow_selective", marks=pytest.mark.full)])
def test_zenflow_resumes_and_reports_overlap(mode: str, tmp_path: Path) -> None:
    held_out = run_ranks(2, train_overlapped, str(tmp_path / "whole"), "--mode", mode)
    run_ranks(2, train_overlapped, str(tmp_path / "parts"), "--mode", mode, "--stop-after", "3")
    assert run_ranks(2, train_overlapped, str(tmp_path / "parts"), "--mode", mode, "--resume") == held_out
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["worker_ms"] > 0 and line["wait_ms"] >= 0 for line in lines)
    assert any(line.get("prediction_error", 0) > 0 for line in lines) == (mode == "zenflow")


def resume_with(folder: str, *flags: str) -> str:
    with pytest.raises(SystemExit) as stop:
        train(folder, "--resume", *flags)
    return str(stop.value)


def test_resume_without_or_with_another_run(tmp_path: Path) -> None:
    assert "no run in" in run_ranks(1, resume_with, str(tmp_path))[0]
    run_ranks(1, train, str(tmp_path), "--stop-after", "1")
    assert "seed: was 0, is 7" in run_ranks(1, resume_with, str(tmp_path), "--seed", "7")[0]


def test_through_the_launcher(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_accelerators", "2", "--master_port", port]
    command += ["examples/train.py", *SMALL, "--stop-after", "2", "--output", str(tmp_path)]
    log = tmp_path / "log.txt"
    with log.open("w") as out:
        launcher = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = launcher.wait(timeout=200)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(launcher.pid, signal.SIGKILL)
    assert status == 0, log.read_text()
    assert "held-out loss" in log.read_text()
    assert not list(Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"))
    assert [step for step, _ in losses(tmp_path)] == [0, 1]
