"""The Hugging Face Trainer with the extended config: trains, logs our measurements, resumes to the
bit."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed_ext.commands import main as command_line
from tests.support.hf_trainer import config_file, curve, train
from tests.support.ranks import run_ranks

pytest.importorskip("transformers")

pytestmark = pytest.mark.cpu(reason='Accelerate chooses the device by itself, and knows no "sim"')


def test_logs_and_resume_with_our_fields(tmp_path: Path) -> None:
    flags = (
        "--config",
        config_file(tmp_path, flatten_tier="distributed", flatten_reserve_fraction=0.1),
    )
    whole = run_ranks(2, train, str(tmp_path / "whole"), *flags)[0]
    run_ranks(2, train, str(tmp_path / "parts"), *flags, "--stop-after", "3")
    resumed = run_ranks(2, train, str(tmp_path / "parts"), *flags, "--resume")[0]

    assert [step for step, *_ in curve(whole)] == [1, 2, 3, 4, 5, 6]
    assert curve(resumed) == curve(whole)
    assert whole[0]["dsext/startup_seconds"] > 0
    assert "dsext/startup_seconds" not in whole[1]  # it has not changed


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_without_our_fields_equals_upstream(stage: int, tmp_path: Path) -> None:
    flags = ("--config", config_file(tmp_path, stage=stage))
    ours = run_ranks(2, train, str(tmp_path / "ours"), *flags)[0]
    upstream = run_ranks(2, train, str(tmp_path / "upstream"), *flags, "--upstream")[0]

    assert curve(ours) == curve(upstream)
    assert not any(name.startswith("dsext/") for log in upstream for name in log)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("gpu", "host", "section"),
    [
        ("24", "96", {"gradients_on_host": True, "state_dtype": "bfloat16"}),
        ("80", "512", {"stage": 3, "update_rule": "exact"}),
        ("20", "256", {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}}),
    ],
)
def test_a_config_that_plan_writes_for_the_trainer_trains_with_it(
    gpu: str, host: str, section: dict[str, Any], tmp_path: Path
) -> None:
    """The way that is suggested for 7 billion parameters, on a small model: as planned, and to the
    Trainer's settings."""
    path = tmp_path / "ds.json"
    sizes = ("--params", "7e9", "--gpus", "1", "--gpu-gb", gpu, "--host-gb", host)
    assert (
        command_line.main(["plan", "--memory", *sizes, "--write", str(path), "--for", "trainer"])
        == 0
    )
    zero = json.loads(path.read_text())["zero_optimization"]
    assert section.items() <= {**zero, **zero["zenflow"]}.items()
    history = run_ranks(2, train, str(tmp_path / "run"), "--config", str(path))[0]
    losses = [loss for _, loss, *_ in curve(history)]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    assert any("dsext/zenflow_step_ms" in log for log in history)


def fails_with(folder: str, *flags: str) -> str:
    with pytest.raises(ValueError, match="zero_optimization") as error:
        train(folder, *flags)
    return str(error.value)


def test_mistake_in_our_fields_is_one_clear_error(tmp_path: Path) -> None:
    flags = ("--config", config_file(tmp_path, flatten_teir="host"))
    for message in run_ranks(2, fails_with, str(tmp_path / "run"), *flags):
        assert "flatten_teir" in message
        assert "flatten_tier" in message


def test_callback_logs_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed_ext.integrations.transformers import MeasurementsCallback

    figures = {"startup_seconds": 2.0, "wait_seconds": 0.5}
    wrapped = SimpleNamespace(optimizer=SimpleNamespace(measurements=lambda: figures))
    said: list[str] = []
    monkeypatch.setattr("deepspeed_ext.runtime.log._logged", set())
    monkeypatch.setattr(
        "deepspeed_ext.runtime.log.logger.log", lambda level, message: said.append(message)
    )
    history = [{"loss": 3.0, "step": 1}]
    callback = MeasurementsCallback()
    state = SimpleNamespace(log_history=history, is_world_process_zero=True)
    logs = {"loss": 3.0}
    callback.on_log(None, state, None, logs=logs, optimizer=wrapped)  # type: ignore[arg-type]
    assert logs == {"loss": 3.0, "dsext/startup_seconds": 2.0, "dsext/wait_seconds": 0.5}
    assert state.log_history[-1] == {**logs, "step": 1}

    figures["wait_seconds"] = 0.25
    logs = {"loss": 2.0}
    callback.on_log(None, state, None, logs=logs, optimizer=wrapped)  # type: ignore[arg-type]
    assert logs == {"loss": 2.0, "dsext/wait_seconds": 0.25}

    assert said == []
    for _ in range(2):
        callback.on_log(None, state, None, logs=logs, optimizer=SimpleNamespace(optimizer=None))  # type: ignore[arg-type]
    assert logs == {"loss": 2.0, "dsext/wait_seconds": 0.25}
    (once,) = said
    assert once.startswith(
        "log_measurements adds nothing: this run's optimizer is not one of deepspeed_ext"
    )
