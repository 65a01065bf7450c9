"""What the schedules of both rules have in common, and how an interval is chosen by measurement.

A schedule is a state machine over plain values that says for every optimizer step what is handed over, awaited and
applied. Steps that overflow are not steps: nothing is asked of the schedule and nothing advances.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, replace
from typing import Any, Generic, TypeVar

__all__ = ["MEASURED_STEPS", "Schedule", "State", "is_overloaded", "smallest_interval"]


@dataclass(frozen=True)
class State:
    """The position in a schedule; goes into checkpoints."""

    steps: int = 0
    """Optimizer steps so far, those that overflowed not counted."""
    interval: int | None = None
    """Optimizer steps handed over together; None: not yet chosen."""
    position: int = 0
    """Gradients collected and not yet handed over."""
    written: int = 0
    """Gradients so far; they go into a ring."""


PlanT = TypeVar("PlanT")
StateT = TypeVar("StateT", bound=State)


class Schedule(ABC, Generic[PlanT, StateT]):
    """Walks through the steps: `plan` says what the coming one does, `advance` that it has been done."""

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
        """For how many gradients there must be room: the worker may read those in flight while others are collected."""

    @property
    def coming(self) -> int:
        """The place in the ring of the coming step's gradient; free once that step has waited."""
        return self.state.written % self.ring

    def latest(self, count: int) -> tuple[int, ...]:
        """The places in the ring of the last `count` gradients, the oldest first."""
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
        """Begin anew, with synchronous steps; a chosen interval stays."""
        self.state = type(self.state)(interval=self.state.interval)

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values."""
        return asdict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken."""
        self.state = type(self.state)(**state)


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
