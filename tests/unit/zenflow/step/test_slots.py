"""The slots of the ring: neither a gradient nor y is overwritten while anyone may still read it."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_ext.zenflow.plan.places import Source
from deepspeed_ext.zenflow.rules.predictive import PredictiveSchedule

EVENTS = (*["nothing"] * 8, "expose", "load", "restart")


@dataclass
class Ring:
    """Who needs which slot: a gradient that was not handed over, the one that the worker has, and y
    that was not read."""

    written: int | None = None
    in_flight: int | None = None
    y: int | None = None

    def write(self, slot: int) -> None:
        assert slot not in (self.in_flight, self.y), f"a gradient replaces what is needed: {self}"
        self.written = slot

    def hand_over(self) -> None:
        assert self.in_flight is None, "one at a time"
        assert self.y is None, f"y was never read: {self}"
        self.in_flight, self.y, self.written = self.written, self.written, None

    def publish_again(self, slot: int) -> None:
        """y is published into the slot once more."""
        assert slot not in (self.written, self.in_flight), f"y replaces what is needed: {self}"
        self.y = slot

    def read(self) -> None:
        assert self.y is not None
        assert self.in_flight is None
        self.y = None


def after(event: str, schedule: PredictiveSchedule, ring: Ring, how: Any) -> tuple[Any, Ring]:
    """What comes between two steps: a look at p, m and v from outside, a load of what was saved, or
    new masters."""
    if event != "nothing":
        ring.in_flight = None
    if event == "restart":
        schedule.restart()
        return schedule, Ring()
    if event == "load":
        state, ring = schedule.state, Ring()
        schedule = PredictiveSchedule(*how)
        schedule.load(state)
        if schedule.plan().predicts:
            ring.publish_again(schedule.handed_over)
    return schedule, ring


def walk(random: Random, source: Source, steps: int = 60) -> int:
    """Train, in the order of `HostOptimizer`. Returns how often y was read before the step's
    gradient took its slot."""
    how = random.random() < 0.9, random.randint(0, 9), True, source
    schedule, ring, replaced = PredictiveSchedule(*how), Ring(), 0
    for _ in range(steps):
        event = random.choice(EVENTS)
        schedule, ring = after(event, schedule, ring, how)
        if source is Source.BACKWARD:
            ring.write(schedule.coming)
        if event == "expose" and schedule.plan().predicts:
            ring.publish_again(schedule.handed_over)
        ring.in_flight = None
        if schedule.wants_verdict:
            schedule.judge(random.choice([0.1, 2.0]))
        plan = schedule.plan()
        if source is Source.HOST:
            ring.write(schedule.coming)
        if plan.predicts:
            replaced += ring.y == schedule.coming
            ring.read()
        else:  # the guard has tripped, or y was read in the step that published it
            ring.y = None
        if source is Source.COPY:
            ring.write(schedule.coming)
        ring.hand_over()
        if plan.waits_last:
            ring.in_flight = None
            ring.read()
        schedule.advance(plan)
        if plan.publish_ahead and not plan.predicts:
            ring.publish_again(schedule.handed_over)
    return replaced


@pytest.mark.parametrize("source", Source)
@given(seed=st.integers(0, 2**32))
def test_neither_a_gradient_nor_y_is_overwritten_while_it_is_needed(
    source: Source, seed: int
) -> None:
    """In seeded orders of steps, looks from outside, loads and restarts, while the guard trips and
    recovers."""
    walk(Random(seed), source)


def test_a_gradient_takes_the_slot_of_the_y_that_its_step_reads_only_if_it_comes_after() -> None:
    times = {source: sum(walk(Random(seed), source) for seed in range(100)) for source in Source}
    assert times.pop(Source.COPY) > 0
    assert set(times.values()) == {0}
