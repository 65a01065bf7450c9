"""The metrics of a step: what each number is made of, with stopwatches whose laps the test
gives."""

from __future__ import annotations

from typing import Any

import pytest

from deepspeed_ext.runtime.timing import Stopwatch
from deepspeed_ext.zenflow.plan.times import SETTLING_STEPS, MeasuredStep
from deepspeed_ext.zenflow.step.metrics import Metrics


class GivenLaps(Stopwatch):
    """Gives these laps."""

    def __init__(self, *laps: float) -> None:
        self.laps = list(laps)

    def start(self, stream: Any = None) -> None:
        pass

    def stop(self, stream: Any = None) -> None:
        pass

    def lap(self) -> list[float]:
        laps, self.laps = self.laps, []
        return laps


def measured(waits: list[float], inside: list[float], between: list[float]) -> Metrics:
    """Metrics behind the first steps, which are not measured."""
    metrics = Metrics()
    metrics.waiting, metrics.gathering = GivenLaps(*waits), GivenLaps(0.125)
    metrics._inside, metrics._between = GivenLaps(*inside), GivenLaps(*between)
    metrics._steps = SETTLING_STEPS
    return metrics


def test_every_number_has_its_name_and_unit() -> None:
    metrics = measured([0.5, 0.25], [1.5], [7.0])
    metrics._steps = 0
    assert (metrics.bytes_down, metrics.bytes_up) == (0, 0)
    metrics.begin_step()
    metrics.bytes_down, metrics.bytes_up = 10, 20
    metrics.note_worker(4.0, gradients=1)
    metrics.note_link(1.0)
    metrics.end_step(synchronous=False)
    metrics._between = GivenLaps(2.0)  # time before the first step is not between two
    metrics.begin_step()
    metrics.bytes_down, metrics.bytes_up = 10, 20
    assert metrics.as_dict() == {
        "wait_ms": 250.0,
        "worker_ms": 4000.0,
        "link_ms": 1000.0,
        "device_ms": 2000.0,
        "step_ms": 1500.0,
        "gather_ms": 125.0,
        "overlap": 1 - 0.75 / 5.0,
        "bytes_down": 10.0,
        "bytes_up": 20.0,
    }
    metrics.begin_step()
    assert (metrics.bytes_down, metrics.bytes_up) == (0, 0)


def take_step(metrics: Metrics, seconds: float, *, synchronous: bool = False) -> None:
    """A step whose parts take `seconds`, times 8 between steps, 4 inside, 2 of them waiting, 1
    gathering; the pass and copies take 5."""
    metrics._between, metrics._inside = GivenLaps(8 * seconds), GivenLaps(4 * seconds)
    metrics.waiting, metrics.gathering = GivenLaps(2 * seconds), GivenLaps(seconds)
    metrics.begin_step()
    metrics.note_worker(5 * seconds, gradients=1)
    metrics.note_link(5 * seconds)
    metrics.end_step(synchronous)


def test_steps_of_one_kind_in_a_row_are_judged_by_their_medians() -> None:
    metrics = Metrics()
    metrics.estimating = GivenLaps()
    for seconds in [90.0] * SETTLING_STEPS + [3.0, 1.0, 2.0]:
        take_step(metrics, seconds, synchronous=True)
    assert metrics.typical_step() == MeasuredStep(16.0, 8.0, 4.0, 10.0, 10.0, 2.0)
    assert "slowdown" not in metrics.as_dict(), "what waits for its own update hides nothing"
    for seconds in (80.0, 3.0, 3.0, 3.0):  # what was noted before the first one ends is left out
        metrics.estimating = GivenLaps(seconds / 2)
        take_step(metrics, seconds)
    assert "slowdown" not in metrics.as_dict()
    take_step(metrics, 3.0)
    assert metrics.typical_step() == MeasuredStep(24.0, 12.0, 6.0, 15.0, 15.0, 3.0, 1.5)
    found = metrics.as_dict()
    assert (found["slowdown"], found["limit"]) == (1.5, 1.0)
    metrics.begin_anew()
    assert metrics.typical_step() is None


@pytest.mark.parametrize("forgets", ["a synchronous step", "a move"])
def test_a_lap_that_comes_late_belongs_to_its_own_step(forgets: str) -> None:
    """On a device a step's times are known when the next one ends."""
    metrics = measured([], [], [])
    metrics.gathering = GivenLaps()
    metrics.end_step(synchronous=forgets == "a synchronous step")
    if forgets == "a move":
        metrics.begin_anew()
    metrics.waiting, metrics.gathering = GivenLaps(9.0), GivenLaps(9.0)
    metrics._inside = GivenLaps(10.0)
    metrics.note_worker(2.0, gradients=1)
    metrics.end_step(synchronous=False)
    assert (metrics.newest["wait"], metrics.newest["inside"]) == (9.0, 10.0)
    assert metrics.as_dict()["overlap"] == 1.0
    metrics.waiting, metrics.gathering = GivenLaps(0.5), GivenLaps(0.25)
    metrics._inside = GivenLaps(1.5)
    metrics.note_worker(2.0, gradients=1)
    metrics.end_step(synchronous=False)
    assert metrics.as_dict()["overlap"] == 1 - 0.5 / 4.0
    past = [list(metrics._alike[part]) for part in ("wait", "gather", "inside")]
    assert past == [[0.5], [0.25], [1.5]]


def test_a_lap_that_has_not_arrived_changes_nothing() -> None:
    metrics = measured([], [], [])
    metrics.newest = {"device": 1.0, "wait": 2.0, "inside": 3.0}
    metrics.begin_step()
    metrics.end_step(synchronous=False)
    assert metrics.newest == {"device": 1.0, "wait": 2.0, "inside": 3.0, "gather": 0.125}
    assert "overlap" not in metrics.as_dict(), "nothing could be hidden yet"


def test_more_waiting_than_there_was_to_hide_is_no_overlap() -> None:
    metrics = measured([9.0], [], [])
    metrics.note_worker(1.0, gradients=1)
    metrics.end_step(synchronous=False)
    assert metrics.as_dict()["overlap"] == 0.0


@pytest.mark.parametrize("gradients", [0, 1])
def test_what_only_publishes_again_counts_as_hidden_but_not_as_typical(gradients: int) -> None:
    metrics = Metrics()
    metrics.note_worker(2.0, gradients)
    assert metrics.newest["worker"] == 2.0
    assert list(metrics._alike["worker"]) == [2.0] * gradients


@pytest.mark.cpu(reason="on a device the times of a step are known a step later")
def test_what_is_not_measured_is_left_out() -> None:
    metrics, found = Metrics(), {"bytes_down", "bytes_up"}
    assert set(metrics.as_dict()) == found
    for known in ({"wait_ms", "worker_ms", "step_ms", "gather_ms"}, {"device_ms"}):
        metrics.begin_step()
        with metrics.waiting.measured():
            metrics.note_worker(10.0, gradients=1)
        metrics.note_link(0.0)
        metrics.end_step(synchronous=True)
        found |= known
        assert set(metrics.as_dict()) == found
