"""The slots of the ring: neither a gradient nor y is overwritten while anyone may still read it,
under both rules."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_ext.zenflow.plan.places import Source
from deepspeed_ext.zenflow.rules.predictive import PredictiveSchedule

EVENTS = (*["nothing"] * 8, "expose", "load", "restart")


class Predictive:
    """What the rule does with its schedule, as far as slots are concerned."""

    def __init__(self, random: Random, source: Source) -> None:
        self._how = (random.random() < 0.9, random.randint(0, 9), True, source)
        self._random = random
        self.schedule: Any = self.fresh()

    def fresh(self) -> PredictiveSchedule:
        return PredictiveSchedule(*self._how)

    def inspect(self) -> None:
        if self.schedule.wants_verdict:
            self.schedule.judge(self._random.choice([0.1, 2.0]))

    def reads_first(self, plan: Any) -> bool:
        return plan.predicts

    def publishes_again(self, plan: Any) -> bool:
        return not plan.predicts and plan.publish_ahead

    def resumes(self) -> bool:
        return self.schedule.plan().predicts


@dataclass
class Ring:
    """Who needs which slot: gradients that are collected, those that the worker has, and y that was
    not read."""

    collected: list[int] = field(default_factory=list)
    in_flight: tuple[int, ...] = ()
    y: int | None = None

    def write(self, slot: int) -> None:
        assert slot not in (*self.collected, *self.in_flight, self.y), (
            f"a gradient replaces what is needed: {self}"
        )
        self.collected.append(slot)

    def hand_over(self) -> None:
        assert not self.in_flight, "one at a time"
        assert self.y is None, f"y was never read: {self}"
        self.in_flight, self.y, self.collected = tuple(self.collected), self.collected[-1], []

    def publish_again(self, slot: int) -> None:
        """y is published into the slot once more."""
        assert slot not in (*self.collected, *self.in_flight), (
            f"y replaces a gradient that is needed: {self}, {slot}"
        )
        self.y = slot

    def arrive(self) -> None:
        self.in_flight = ()

    def read(self) -> None:
        assert self.y is not None
        assert not self.in_flight
        self.y = None


def happens(event: str, rule: Any, ring: Ring) -> Ring:
    """What comes between two steps: a look at p, m and v from outside, a load of what was saved, or
    new masters."""
    ring.arrive()
    if event == "load":
        state = rule.schedule.state_dict()
        rule.schedule = rule.fresh()
        rule.schedule.load_state_dict(state)
        ring = Ring()
        if rule.resumes():
            ring.publish_again(rule.schedule.handed_over)
    if event == "restart":
        rule.schedule.restart()
        ring = Ring()
    return ring


def begin(rule: Any, ring: Ring, was_exposed: bool) -> Any:
    """`HostOptimizer.begin_step`; returns the plan."""
    if was_exposed and rule.resumes():
        ring.publish_again(rule.schedule.handed_over)
    if rule.schedule.plan().waits_first:
        ring.arrive()
        rule.inspect()
    return rule.schedule.plan()


def read_first(rule: Any, ring: Ring, plan: Any) -> bool:
    """Compute weights from y if the plan says so; returns whether y was in the slot of the coming
    gradient."""
    was_there = ring.y == rule.schedule.coming
    if rule.reads_first(plan):
        ring.read()
        return was_there
    if plan.waits_first:  # the guard has tripped, or y was read in the step that published it
        ring.y = None
    return False


def walk(rule: Any, random: Random, steps: int, source: Source) -> int:
    """Train, in the order of `HostOptimizer`. Returns how often y was read before the step's
    gradient took its slot."""
    ring, replaced = Ring(), 0
    for _ in range(steps):
        event = random.choice(EVENTS)
        if event != "nothing":
            ring = happens(event, rule, ring)
        if source is Source.BACKWARD:
            ring.write(rule.schedule.coming)
        plan = begin(rule, ring, event == "expose")
        if source is Source.HOST:
            ring.write(rule.schedule.coming)
        replaced += read_first(rule, ring, plan)
        if source is Source.COPY:
            ring.write(rule.schedule.coming)
        if plan.handed_over:
            assert plan.handed_over == len(ring.collected)
            ring.hand_over()
        if plan.waits_last:
            ring.arrive()
            ring.read()
        rule.schedule.advance(plan)
        if rule.publishes_again(plan):
            ring.publish_again(rule.schedule.handed_over)
    return replaced


@pytest.mark.parametrize("source", Source)
@settings(deadline=None, max_examples=200)
@given(seed=st.integers(0, 2**32))
def test_neither_a_gradient_nor_y_is_overwritten_while_it_is_needed(
    source: Source, seed: int
) -> None:
    """In seeded orders of steps, looks from outside, loads and restarts, while the guard trips and
    recovers."""
    random = Random(seed)
    walk(Predictive(random, source), random, 60, source)


def test_a_gradient_takes_the_slot_of_the_y_that_its_step_reads_only_if_it_comes_after() -> None:
    times = {
        source: sum(
            walk(Predictive(random, source), random, 60, source)
            for random in map(Random, range(100))
        )
        for source in Source
    }
    assert times.pop(Source.COPY) > 0
    assert set(times.values()) == {0}
