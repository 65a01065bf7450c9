"""`deepspeed-ext report` says what limited a run, from what the Trainer and the example record."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from deepspeed_ext.commands import main as cli
from deepspeed_ext.commands import report
from deepspeed_ext.errors import ConfigError

STEP = {"device_ms": 80.0, "step_ms": 20.0, "wait_ms": 0.0, "worker_ms": 60.0, "overlap": 1.0}


def of_trainer(folder: Path, *changes: dict[str, float]) -> Path:
    """A checkpoint of the Trainer whose log has a step for each of `changes` of `STEP`."""
    rows = [
        {"loss": 1.0, "step": number}
        | {f"dsext/zenflow_{name}": value for name, value in {**STEP, **each}.items()}
        for number, each in enumerate(changes)
    ]
    checkpoint = folder / "checkpoint-20"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    return folder


def lanes(folder: Path, *changes: dict[str, float]) -> report.Lanes:
    return report.lanes_of(report.read_records(of_trainer(folder, *changes)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, "The model limits this run: 0.0%"),
        ({"wait_ms": 4.0}, "The model limits this run: 4.0%"),
        ({"wait_ms": 40.0, "worker_ms": 140.0}, "The optimizer process limits this run: 40%"),
        ({"wait_ms": 30.0, "link_ms": 130.0}, "The link to the host limits this run: 30%"),
    ],
)
def test_the_verdict_names_what_a_step_waits_for(
    change: dict[str, float], says: str, tmp_path: Path
) -> None:
    found = lanes(tmp_path, change, change, {})
    assert found.verdict.startswith(says)
    assert found.steps == 3
    drawn = report.picture(found)
    ET.fromstring(drawn)
    assert found.verdict in drawn


def test_a_pass_counts_for_all_steps_of_its_interval(tmp_path: Path) -> None:
    assert lanes(tmp_path, {"interval": 2.0}).worker == 30.0


def test_synchronous_steps_do_not_count_and_what_a_log_leaves_out_has_not_changed(
    tmp_path: Path,
) -> None:
    slow = {"dsext/zenflow_wait_ms": 90.0, "dsext/zenflow_step_ms": 95.0}
    whole = {f"dsext/zenflow_{name}": value for name, value in STEP.items()}
    rows = [slow, {"loss": 1.0}, whole, {"dsext/zenflow_wait_ms": 50.0}]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    found = report.lanes_of(report.read_records(tmp_path))
    assert found.waits == (0.0, 0.5)
    assert found.total == 100.0


def test_the_newest_checkpoint_is_read(tmp_path: Path) -> None:
    of_trainer(tmp_path, {"worker_ms": 1.0})
    newer = tmp_path / "checkpoint-100"
    (tmp_path / "checkpoint-20").rename(newer)
    of_trainer(tmp_path, {"worker_ms": 2.0})
    assert report.lanes_of(report.read_records(tmp_path)).worker == 1.0


def test_the_command_reads_the_example_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = {"step": 1, "seconds": 0.1, "wait_ms": 50.0, "worker_ms": 120.0, "overlap": 0.5}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    drawing = tmp_path / "run.svg"
    assert cli.main(["report", str(tmp_path), "--svg", str(drawing)]) == 0
    assert "The optimizer process limits this run: 50%" in capsys.readouterr().out
    assert drawing.read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("metrics.jsonl", '{"step": 1, "loss": 2.0}\n', "call log_measurements"),
        ("metrics.jsonl", '{"worker_ms": 3.0}\n', "Warm-up steps never do"),
        ("metrics.jsonl", "not json\n", "expected the Trainer's trainer_state.json"),
        ("metrics.jsonl", "[1]\n", "expected the Trainer's trainer_state.json"),
        ("trainer_state.json", "{}", "expected the Trainer's trainer_state.json"),
        ("other.txt", "", "got neither"),
    ],
)
def test_a_file_that_tells_nothing_is_one_error_with_a_remedy(
    name: str, text: str, says: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=says):
        report.lanes_of(report.read_records(tmp_path))
