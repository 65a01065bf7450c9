"""The metrics of a step: what each number is made of, with stopwatches whose laps the test
gives."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest

from deepspeed_ext.runtime.stopwatch import Stopwatch
from deepspeed_ext.zenflow.plan.advice import MeasuredStep
from deepspeed_ext.zenflow.step import metrics as metrics_module
from deepspeed_ext.zenflow.step.adviser import Adviser
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
    return Metrics(
        waiting=GivenLaps(*waits),
        gathering=GivenLaps(0.125),
        _inside=GivenLaps(*inside),
        _between=GivenLaps(*between),
    )


def test_every_number_has_its_name_and_unit() -> None:
    metrics = measured([0.5, 0.25], [1.5], [7.0])
    metrics.begin_step()
    assert (metrics.bytes_down, metrics.bytes_up) == (0, 0)
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


class Judge:
    """Keeps the typical steps that it is given, once there are two."""

    def __init__(self) -> None:
        self.judged: list[MeasuredStep | None] = []

    def is_due(self, steps: int) -> bool:
        return steps >= 2

    def judge(self, step: MeasuredStep | None) -> None:
        self.judged.append(step)

    def measurements(self) -> dict[str, float]:
        return {"slowdown": 1.5}


def take_step(metrics: Metrics, seconds: float, *, synchronous: bool = False) -> None:
    """A step whose parts take `seconds`, times 8 between steps, 4 inside, 2 of them waiting, 1
    gathering; the pass over two gradients takes 10 and copies take 5."""
    metrics._between, metrics._inside = GivenLaps(8 * seconds), GivenLaps(4 * seconds)
    metrics.waiting, metrics.gathering = GivenLaps(2 * seconds), GivenLaps(seconds)
    metrics.begin_step()
    metrics.note_worker(10 * seconds, gradients=2)
    metrics.note_link(5 * seconds)
    metrics.end_step(synchronous)


def test_overlapped_steps_in_a_row_are_judged_by_their_medians() -> None:
    judge = Judge()
    metrics = Metrics(adviser=cast(Adviser, judge))
    for synchronous, seconds in ((True, 90.0), (True, 90.0), (False, 3.0)):
        take_step(metrics, seconds, synchronous=synchronous)
    assert judge.judged == []
    take_step(metrics, 1.0)
    take_step(metrics, 2.0)
    assert judge.judged[-1] == MeasuredStep(16.0, 8.0, 4.0, 10.0, 10.0, 2.0)
    take_step(metrics, 90.0, synchronous=True)
    take_step(metrics, 7.0)
    assert len(judge.judged) == 2, "a synchronous step begins anew"
    take_step(metrics, 7.0)
    assert judge.judged[-1] == MeasuredStep(56.0, 28.0, 14.0, 35.0, 35.0, 7.0)
    assert metrics.as_dict()["slowdown"] == 1.5


def test_nothing_is_judged_while_a_share_is_chosen() -> None:
    """The run may help itself at its end. What it has measured by then is judged if it stays."""
    judge = Judge()
    metrics = Metrics(adviser=cast(Adviser, judge))
    for seconds in (3.0, 1.0, 2.0):
        metrics.estimating = GivenLaps(seconds / 2)
        take_step(metrics, seconds)
    assert judge.judged == []
    expected = MeasuredStep(16.0, 8.0, 4.0, 10.0, 10.0, 2.0, 1.0)
    assert metrics.typical_step() == expected
    metrics.estimating = None
    take_step(metrics, 2.0)
    assert judge.judged == [expected]


@pytest.mark.parametrize("forgets", ["a synchronous step", "a move"])
def test_a_lap_that_comes_late_belongs_to_its_own_step(forgets: str) -> None:
    """On a device a step's times are known when the next one ends."""
    metrics = measured([], [], [])
    metrics.gathering = GivenLaps()
    metrics.end_step(synchronous=forgets == "a synchronous step")
    if forgets == "a move":
        metrics.resume({})
    metrics.waiting, metrics.gathering = GivenLaps(9.0), GivenLaps(9.0)
    metrics._inside = GivenLaps(10.0)
    metrics.note_worker(2.0, gradients=1)
    metrics.end_step(synchronous=False)
    assert (metrics.wait_seconds, metrics.step_seconds) == (9.0, 10.0)
    assert metrics.overlap == 1.0
    metrics.waiting, metrics.gathering = GivenLaps(0.5), GivenLaps(0.25)
    metrics._inside = GivenLaps(1.5)
    metrics.note_worker(2.0, gradients=1)
    metrics.end_step(synchronous=False)
    assert metrics.overlap == 1 - 0.5 / 4.0
    past = metrics._overlapped
    assert [list(each) for each in (past.wait, past.gather, past.inside)] == [[0.5], [0.25], [1.5]]


def test_a_lap_that_has_not_arrived_changes_nothing() -> None:
    metrics = measured([], [], [])
    metrics.device_seconds, metrics.wait_seconds, metrics.step_seconds = 1.0, 2.0, 3.0
    metrics.begin_step()
    metrics.end_step(synchronous=False)
    assert (metrics.device_seconds, metrics.wait_seconds, metrics.step_seconds) == (1.0, 2.0, 3.0)
    assert math.isnan(metrics.overlap), "nothing could be hidden yet"


def test_more_waiting_than_there_was_to_hide_is_no_overlap() -> None:
    metrics = measured([9.0], [], [])
    metrics.note_worker(1.0, gradients=1)
    metrics.end_step(synchronous=False)
    assert metrics.overlap == 0.0


def test_the_typical_times_are_medians_without_the_first_steps() -> None:
    metrics = Metrics()
    settling, remembered = metrics_module._SETTLING_STEPS, metrics_module._REMEMBERED
    assert metrics.typical() == (0.0, 0.0)
    for seconds in [100.0] * settling + [1.0, 2.0, 9.0]:
        metrics.note_worker(seconds, gradients=1)
        metrics.note_worker(50.0, gradients=0)
        metrics._between = GivenLaps(10 * seconds)
        metrics.begin_step()
    assert metrics.typical() == (2.0, 20.0)
    for _ in range(2 * remembered):
        metrics.note_worker(7.0, gradients=2)
    assert len(metrics._worker) == remembered + 1
    assert metrics.typical()[0] == 7.0


@pytest.mark.parametrize("gradients", [0, 1])
def test_what_only_publishes_again_counts_as_hidden_but_not_as_typical(gradients: int) -> None:
    metrics = Metrics()
    metrics.note_worker(2.0, gradients)
    assert metrics.worker_seconds == 2.0
    assert metrics._worker == [2.0] * gradients


def test_a_resumed_run_goes_on_with_its_samples() -> None:
    """The time before its first step is not between two steps."""
    straight, first = (measured([0.5], [1.5], [9.0]) for _ in range(2))
    for metrics in (straight, first):
        for between in (9.0, 8.0, 2.0, 3.0):
            metrics._between = GivenLaps(between)
            metrics.begin_step()
            metrics.note_worker(4.0, gradients=1)
            metrics.end_step(synchronous=False)
    again = measured([], [], [100.0])
    again.resume(first.samples())
    again.begin_step()
    assert again.samples() == straight.samples()
    assert again.typical() == straight.typical() == (4.0, 2.5)
    assert again.typical_step() == straight.typical_step() is not None
