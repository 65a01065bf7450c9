"""The Hugging Face Trainer with the extended config: trains, logs our measurements, resumes to the bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import deepspeed_ext
from tests.support.paths import ROOT
from tests.support.ranks import run_ranks

pytest.importorskip("transformers")

MODEL = ["--dim", "32", "--layers", "2", "--seq-len", "32"]
SMALL = [*MODEL, "--batch-size", "2", "--grad-accum", "2", "--steps", "6", "--log-every", "1"]


def train(folder: str, *flags: str) -> list[dict[str, float]]:
    """Run the example on this rank, with the extension unless --upstream; returns the Trainer's log."""
    if str(ROOT / "examples") not in sys.path:
        sys.path.insert(0, str(ROOT / "examples"))
    import hf_trainer as example
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    args = example.parse_args([*SMALL, "--output", folder, *flags])
    try:
        return example.train(args).state.log_history
    finally:
        deepspeed_ext.disable()


def curve(history: list[dict[str, float]]) -> list[tuple[float, float, float, float]]:
    """Step, loss, gradient norm and learning rate of each log of a step."""
    return [(log["step"], log["loss"], log["grad_norm"], log["learning_rate"]) for log in history if "loss" in log]


def config_file(folder: Path, **zero_fields: Any) -> str:
    """configs/hf.json with other fields of ours than it has."""
    config = json.loads((ROOT / "configs" / "hf.json").read_text())
    del config["zero_optimization"]["flatten_reserve_fraction"]
    config["zero_optimization"].update(zero_fields)
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return str(path)


def test_logs_and_resume_with_our_fields(tmp_path: Path) -> None:
    flags = ("--config", config_file(tmp_path, flatten_tier="distributed", flatten_reserve_fraction=0.1))
    whole = run_ranks(2, train, str(tmp_path / "whole"), *flags)[0]
    run_ranks(2, train, str(tmp_path / "parts"), *flags, "--stop-after", "3")
    resumed = run_ranks(2, train, str(tmp_path / "parts"), *flags, "--resume")[0]

    assert [step for step, *_ in curve(whole)] == [1, 2, 3, 4, 5, 6]
    assert curve(resumed) == curve(whole)
    assert whole[0]["dsext/startup_seconds"] > 0
    assert "dsext/startup_seconds" not in whole[1]  # it has not changed


@pytest.mark.parametrize("stage", [2, 3])
def test_without_our_fields_equals_upstream(stage: int, tmp_path: Path) -> None:
    flags = ("--config", config_file(tmp_path, stage=stage))
    ours = run_ranks(2, train, str(tmp_path / "ours"), *flags)[0]
    upstream = run_ranks(2, train, str(tmp_path / "upstream"), *flags, "--upstream")[0]

    assert curve(ours) == curve(upstream)
    assert not any(name.startswith("dsext/") for log in upstream for name in log)


def fails_with(folder: str, *flags: str) -> str:
    with pytest.raises(ValueError, match="zero_optimization") as error:
        train(folder, *flags)
    return str(error.value)


def test_mistake_in_our_fields_is_one_clear_error(tmp_path: Path) -> None:
    flags = ("--config", config_file(tmp_path, flatten_teir="host"))
    for message in run_ranks(2, fails_with, str(tmp_path / "run"), *flags):
        assert "flatten_teir" in message
        assert "flatten_tier" in message


def test_callback_logs_what_is_new() -> None:
    from deepspeed_ext.integrations.transformers import MeasurementsCallback

    figures = {"startup_seconds": 2.0, "wait_seconds": 0.5}
    wrapped = SimpleNamespace(optimizer=SimpleNamespace(measurements=lambda: figures))
    callback, state = MeasurementsCallback(), SimpleNamespace(log_history=[{"loss": 3.0, "step": 1}])
    logs = {"loss": 3.0}
    callback.on_log(None, state, None, logs=logs, optimizer=wrapped)  # type: ignore[arg-type]
    assert logs == {"loss": 3.0, "dsext/startup_seconds": 2.0, "dsext/wait_seconds": 0.5}
    assert state.log_history[-1] == {**logs, "step": 1}

    figures["wait_seconds"] = 0.25
    logs = {"loss": 2.0}
    callback.on_log(None, state, None, logs=logs, optimizer=wrapped)  # type: ignore[arg-type]
    assert logs == {"loss": 2.0, "dsext/wait_seconds": 0.25}

    callback.on_log(None, state, None, logs=logs, optimizer=SimpleNamespace(optimizer=None))  # type: ignore[arg-type]
    assert logs == {"loss": 2.0, "dsext/wait_seconds": 0.25}


def test_missing_extra_is_named() -> None:
    code = "import sys; sys.modules['transformers'] = None; import deepspeed_ext.integrations.transformers"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "ImportError" in done.stderr.splitlines()[-1]
    assert "deepspeed-ext[transformers]" in done.stderr.splitlines()[-1]
