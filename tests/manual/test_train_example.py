"""The main job: resumes to the bit, saves when it is interrupted, never mixes two
runs in a folder, and ends with one clear error on a wrong command line."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed import comm as dist

from deepspeed_ext.zenflow.rules import predictive
from tests.support.forked import run_forked
from tests.support.paths import ROOT
from tests.support.ranks import run_ranks
from tools import launch

MODEL = ["--dim", "32", "--layers", "2", "--heads", "2", "--seq-len", "32"]
SMALL = [*MODEL, "--batch-size", "2", "--grad-accum", "2", "--steps", "6", "--sample-bytes", "8"]


def example() -> Any:
    if str(ROOT / "examples") not in sys.path:
        sys.path.insert(0, str(ROOT / "examples"))
    return importlib.import_module("train")


def train(folder: str, *flags: str) -> float | None:
    """Run the example on this rank; returns the held-out loss."""
    return example().run(example().parse_args([*SMALL, "--output", folder, *flags]))


def output_of(*flags: str) -> tuple[str, set[str]]:
    args = example().parse_args([*flags])
    return args.output.name, set(example().load_config(args)["zero_optimization"])


def test_upstream_overwrites_no_other_run() -> None:
    assert run_ranks(1, output_of) == [("zenflow", {"stage", "zenflow"})]
    assert run_ranks(1, output_of, "--upstream") == [("zenflow-upstream", {"stage"})]


def losses(folder: Path) -> list[tuple[int, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [(line["step"], line["loss"]) for line in map(json.loads, lines)]


def train_overlapped(folder: str, *flags: str) -> float | None:
    """As `train`, whose six steps would all be synchronous by default."""
    with patch.object(predictive, "_WARM_UP_STEPS", 1):
        return train(folder, *flags)


@pytest.mark.parametrize(
    "mode", ["zenflow", pytest.param("zenflow_selective", marks=pytest.mark.full)]
)
def test_zenflow_resumes_and_reports_overlap(mode: str, tmp_path: Path) -> None:
    held_out = run_ranks(2, train_overlapped, str(tmp_path / "whole"), "--mode", mode)
    run_ranks(2, train_overlapped, str(tmp_path / "parts"), "--mode", mode, "--stop-after", "3")
    assert (
        run_ranks(2, train_overlapped, str(tmp_path / "parts"), "--mode", mode, "--resume")
        == held_out
    )
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    text = (tmp_path / "whole" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert "NaN" not in text
    assert all(line["worker_ms"] > 0 for line in lines)
    assert lines[-1]["wait_ms"] >= 0
    assert "overlap" not in lines[0]  # the first step waits for its own update
    assert 0 <= lines[-1]["overlap"] <= 1
    assert any(line.get("prediction_error", 0) > 0 for line in lines) == (mode == "zenflow")


def interrupted(folder: str, *flags: str) -> tuple[float | None, str]:
    """Train, with a signal to the last rank in the second step; returns what the run returns, and
    what it prints."""
    train_step = example().train_step

    def signalled(engine: Any, text: Any, step: int, args: Any) -> Any:
        if step == 1 and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return train_step(engine, text, step, args)

    printed = io.StringIO()
    with patch.object(example(), "train_step", signalled), redirect_stdout(printed):
        return train(folder, *flags), printed.getvalue()


def test_a_signal_to_one_rank_saves_all_after_the_same_step(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    before = run_ranks(2, handlers)
    (loss, printed), (other_loss, nothing) = run_ranks(2, interrupted, folder, "--mode", "zero3")
    assert loss is other_loss is None
    assert "saved after step 2. Continue with:" in printed
    assert "--resume" in printed.splitlines()[-1]
    assert not re.search(r"^0 parameters", printed, re.MULTILINE)
    assert re.search(r"^[1-9][\d,]* parameters", printed, re.MULTILINE)
    assert nothing == ""
    assert [step for step, _ in losses(tmp_path / "run")] == [0, 1]
    assert run_ranks(2, handlers) == before
    _, printed = run_ranks(2, interrupted, folder, "--mode", "zero3", "--resume")[0]
    assert f"resuming {folder} from checkpoint step2, after 2 steps" in printed
    assert [step for step, _ in losses(tmp_path / "run")] == list(range(6))


def handlers() -> list[str]:
    """What signals do in this process, which other tests use, too."""
    return [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]


def refused(folder: str, *flags: str) -> str:
    with pytest.raises(SystemExit) as stop:
        train(folder, *flags)
    return str(stop.value)


def test_a_folder_never_holds_two_runs(tmp_path: Path) -> None:
    assert "no checkpoint in" in run_ranks(1, refused, str(tmp_path), "--resume")[0]
    # of a run that ended before its first save
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 99.0}\n')
    run_ranks(1, train, str(tmp_path), "--stop-after", "1")
    assert [loss < 99 for _, loss in losses(tmp_path)] == [True]
    assert "seed: was 0, is 7" in run_ranks(1, refused, str(tmp_path), "--resume", "--seed", "7")[0]
    message = run_ranks(1, refused, str(tmp_path))[0]
    assert f"{tmp_path} holds a run, saved as step1" in message
    assert f"rm -r {tmp_path}" in message
    assert "--resume" in message
    assert [step for step, _ in losses(tmp_path)] == [0]


def resumed(folder: str, *flags: str) -> str:
    """What a run prints that continues the one in `folder`."""
    printed = io.StringIO()
    argv = ["examples/train.py", *flags]
    with redirect_stdout(printed), patch.object(sys, "argv", argv):
        train(folder, *flags)
    return printed.getvalue()


def test_a_run_that_has_more_steps_than_asked_for_ends_well(tmp_path: Path) -> None:
    """It once raised UnboundLocalError."""
    run_ranks(1, train, str(tmp_path), "--mode", "zero2", "--steps", "2")
    proposed = run_ranks(1, refused, str(tmp_path), "--mode", "zero2", "--steps", "1")[0]
    assert "--steps 102 --resume" in proposed
    (said,) = run_ranks(1, resumed, str(tmp_path), "--mode", "zero2", "--steps", "1", "--resume")
    assert "already trained 2 steps. Continue with:" in said
    assert "--steps 102 --resume" in said
    assert "held-out loss" in said
    assert [step for step, _ in losses(tmp_path)] == [0, 1]


def test_without_a_launcher_it_is_one_rank(tmp_path: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    flags = [*SMALL, "--steps", "1", "--output", str(tmp_path / "run")]
    found = run_forked("examples/train.py", *flags, environment=environment)
    assert found.returncode == 0, found.stderr
    assert "rank 0 of 1" in found.stdout + found.stderr
    assert [step for step, _ in losses(tmp_path / "run")] == [0]


@pytest.mark.parametrize(
    ("made_by", "expected"),
    [
        ("make train MODE=zero2", "make train MODE=zero2 ARGS='--steps 9 --resume'"),
        (None, "deepspeed --num_accelerators 2 examples/train.py --mode zero2 --steps 9 --resume"),
    ],
)
def test_the_command_that_continues_is_the_one_that_was_given(
    made_by: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    example()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MADE_BY", raising=False)
    if made_by is not None:
        monkeypatch.setenv("MADE_BY", made_by)
    given = ["examples/train.py", "--local_rank=0", "--mode", "zero2", "--steps", "9"]
    for once in (["--stop-after", "3"], ["--stop-after=3"], ["--resume"]):
        monkeypatch.setattr(sys, "argv", [*given, *once])
        assert importlib.import_module("folder").command("--resume") == expected


def test_a_second_ctrl_c_kills_ranks_that_do_not_end() -> None:
    ranks = ["bash", "-c", "trap '' TERM; sleep 1000 & echo up; wait; wait"]
    code = f"import sys; from tools.launch import Job; sys.exit(Job({ranks!r}, None).wait())"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as job:
        assert job.stdout.readline() == "up\n"
        job.send_signal(signal.SIGINT)
        assert job.stderr.readline() == "\n"
        assert "Ctrl-C again ends them at once" in job.stderr.readline()
        assert job.poll() is None
        job.send_signal(signal.SIGINT)
        assert job.stdout.read() == ""  # the last process that could write there is gone
        assert job.wait() == 130


RANK_THAT_SAVES = "trap 'echo saved; exit' TERM; echo up; for _ in {1..300}; do sleep 0.1; done"


def test_ctrl_c_ends_the_ranks_and_the_launcher_leaves_after_them() -> None:
    launcher = ["bash", "-c", f'bash -c "{RANK_THAT_SAVES}"; echo left']
    code = f"import sys; from tools.launch import Job; sys.exit(Job({launcher!r}, None).wait())"
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout.readline() == "up\n"
        job.send_signal(signal.SIGINT)
        assert job.stdout.read() == "saved\nleft\n"
        assert job.wait() == 130


@pytest.mark.parametrize("accelerators", [0, 3])
def test_ranks_are_started_with_deepspeeds_launcher(
    accelerators: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[list[str], str | None]] = []

    class Started:
        def __init__(self, command: list[str], environment: dict[str, str]) -> None:
            started.append((command[2:], environment.get("DS_ACCELERATOR")))

        def wait(self) -> int:
            return 7

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: accelerators)
    monkeypatch.setattr(launch, "Job", Started)
    monkeypatch.setattr(sys, "argv", ["launch", "auto", "train.py", "--mode", "zero2"])
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    try:
        with pytest.raises(SystemExit) as ended:
            launch.main()
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.value.code == 7
    count, device = (str(accelerators), None) if accelerators else ("2", "cpu")
    command = ["deepspeed.launcher.runner", "--log_level", "error", "--num_accelerators", count]
    assert started == [([*command, "train.py", "--mode", "zero2"], device)]
