"""Metrics of a step: what is not measured yet is left out, and overlap is that of overlapped
steps."""

from __future__ import annotations

import pytest

from deepspeed_ext.zenflow.step.metrics import Metrics

COUNTED = {"bytes_down", "bytes_up"}


def step(metrics: Metrics, worker: float, synchronous: bool) -> None:
    metrics.begin_step()
    with metrics.waiting.measured():
        pass
    metrics.note_worker(worker, gradients=1)
    metrics.note_link(0.0)
    metrics.end_step(synchronous)


@pytest.mark.cpu(reason="on a device the times of a step are known a step later")
def test_what_is_not_measured_is_left_out() -> None:
    metrics = Metrics()
    assert set(metrics.as_dict()) == COUNTED
    step(metrics, 10.0, synchronous=True)
    assert set(metrics.as_dict()) == COUNTED | {"wait_ms", "worker_ms", "step_ms", "gather_ms"}
    step(metrics, 10.0, synchronous=True)
    assert set(metrics.as_dict()) == COUNTED | {
        "wait_ms",
        "worker_ms",
        "step_ms",
        "gather_ms",
        "device_ms",
    }


@pytest.mark.cpu(reason="on a device the times of a step are known a step later")
def test_overlap_is_that_of_overlapped_steps() -> None:
    metrics = Metrics()
    step(metrics, 1e-9, synchronous=True)  # waits much longer than it could hide
    assert "overlap" not in metrics.as_dict()
    step(metrics, 1e6, synchronous=False)  # waits for next to nothing of it
    assert metrics.as_dict()["overlap"] == pytest.approx(1.0)
