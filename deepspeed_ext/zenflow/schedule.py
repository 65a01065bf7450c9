"""What the schedules of both rules have in common, and how an interval is chosen by measurement.

A schedule is a state machine over plain values. For every optimizer step it says what is handed over, awaited and
applied. Overflowed steps neither query nor advance the schedule.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Generic, TypeVar

__all__ = [
    "MEASURED_INTERVAL_LIMIT",
    "MEASURED_STEPS",
    "Schedule",
    "State",
    "StepPlan",
    "is_overloaded",
    "smallest_interval",
]


@dataclass(frozen=True)
class StepPlan(ABC):
    """What one optimizer step does, as far as it does not depend on the rule."""

    handed_over: int
    """Gradients handed to the worker at this step: 0, 1 or the interval."""

    @property
    @abstractmethod
    def waits_first(self) -> bool:
        """The update in flight must have arrived before this step's weights are computed."""

    @property
    @abstractmethod
    def waits_last(self) -> bool:
        """This step waits for the update that it hands over."""


@dataclass(frozen=True)
class State:
    """The position in a schedule."""

    steps: int = 0
    """Optimizer steps so far; overflowed steps do not count."""
    interval: int | None = None
    """Optimizer steps handed over together; None: not yet chosen."""
    position: int = 0
    """Gradients collected and not yet handed over."""
    written: int = 0
    """Gradients written to the ring so far."""


PlanT = TypeVar("PlanT", bound=StepPlan)
StateT = TypeVar("StateT", bound=State)


class Schedule(ABC, Generic[PlanT, StateT]):
    """Walks through the steps: `plan` says what the coming step does, `advance` that it has been done."""

    def __init__(self, state: StateT) -> None:
        self.state = state

    @abstractmethod
    def plan(self) -> PlanT:
        """What the coming step does."""

    @abstractmethod
    def advance(self, plan: PlanT) -> None:
        """The step that `plan` describes has been carried out."""

    @property
    @abstractmethod
    def ring(self) -> int:
        """Slots of the gradient ring in use: the worker may read gradients in flight while others are collected."""

    @property
    def coming(self) -> int:
        """The slot of the coming step's gradient; free once that step has waited."""
        return self.state.written % self.ring

    def latest(self, count: int) -> tuple[int, ...]:
        """The slots of the last `count` gradients, oldest first."""
        return tuple((self.state.written - count + k) % self.ring for k in range(count))

    @property
    def interval(self) -> int | None:
        """Optimizer steps handed over together; None: not yet chosen."""
        return self.state.interval

    def choose_interval(self, interval: int) -> None:
        """Settle the interval that was left open; the same on every rank."""
        assert self.state.interval is None
        self.state = replace(self.state, interval=interval)

    def restart(self) -> None:
        """Begin anew with synchronous steps; a chosen interval stays."""
        self.state = type(self.state)(interval=self.state.interval)

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values, without what the collected gradients say already."""
        return {name: value for name, value in asdict(self.state).items() if name not in ("position", "written")}

    def load_state_dict(self, state: Mapping[str, Any], position: int) -> None:
        """Continue where `state_dict` was taken with `position` collected gradients, which begin the ring anew."""
        self.state = type(self.state)(**state, position=position, written=position)


MEASURED_INTERVAL_LIMIT = 8
"""The longest interval that is chosen by measurement: the ring has slots for that many gradients."""
MEASURED_STEPS = 5
"""Synchronous steps that are timed before an interval is chosen."""


def smallest_interval(worker_seconds: float, device_seconds: float, limit: int) -> int:
    """The smallest interval that the worker keeps up with, at most `limit`.

    A pass of S steps moves 24 + 2 + 2 S bytes an element (p, m, v both ways, y, S gradients) where a pass of one step
    moves 28, and may take as long as S steps of the accelerator; a twentieth is kept in reserve.

    Args:
        worker_seconds: duration of a pass of one step.
        device_seconds: duration of a step on the accelerator, without waiting for the worker.
    """
    for interval in range(1, limit):
        if worker_seconds * (26 + 2 * interval) / 28 <= 0.95 * interval * device_seconds:
            return interval
    return max(1, limit)


def is_overloaded(worker_seconds: float, device_seconds: float, interval: int) -> bool:
    """Whether the worker is slower than the accelerator even at `interval`."""
    return worker_seconds * (26 + 2 * interval) / 28 > interval * device_seconds and math.isfinite(worker_seconds)
