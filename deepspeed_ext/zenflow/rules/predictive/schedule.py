"""Schedules the predictive rule: a state machine over plain values.

Overlapped steps: the worker processes an interval's gradients while the accelerator runs the next
interval, and the weights in between are predicted. Synchronous steps (during warm-up, while the
guard is tripped, or always if overlap is off): every step waits for its own update.

Example with interval 2 and one warm-up step; ``>`` hands over, ``<`` waits for what was handed over
before::

    step        1           2         3           4         5
    weights     exact       drifted   predicted   drifted   predicted
    worker      > < step 1            < >                   < >
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from deepspeed_ext.zenflow.plan.places import Arrival, WeightsArrival
from deepspeed_ext.zenflow.plan.predictive import ring_of
from deepspeed_ext.zenflow.rules.predictive.guard import GuardState
from deepspeed_ext.zenflow.step.schedule import MEASURED_STEPS, Schedule, State, StepPlan

__all__ = [
    "PredictivePlan",
    "PredictiveSchedule",
    "PredictiveState",
    "WeightSource",
    "default_warm_up_steps",
]

_WARM_UP_STEPS, _LONGER_WARM_UP_STEPS = 10, 40


def default_warm_up_steps(interval: int | None) -> int:
    """Synchronous steps at the start, while the moments have seen too few gradients to predict
    from: the measured need at interval 1 (docs/results.md), and more at other intervals and while
    the interval is not chosen (None)."""
    return _WARM_UP_STEPS if interval == 1 else _LONGER_WARM_UP_STEPS


class WeightSource(enum.Enum):
    """How a step computes its weights."""

    EXACT = "exact"
    """W = round(p): hand over the gradients up to this step's, wait for their update and copy p.
    Under the exact rule it may arrive during the next forward instead."""
    DRIFTED = "drifted"
    """W moves by the estimated effect of this step's gradient, which is handed over at the end of
    its interval."""
    PREDICTED = "predicted"
    """W = round(y - effect of the interval's gradients): wait for the update in flight, then hand
    over the next."""


@dataclass(frozen=True)
class PredictivePlan(StepPlan):
    """Describes one optimizer step."""

    source: WeightSource
    position: int
    """Position of this step within its interval, from 0."""
    publish_ahead: bool
    """Whether the next step is overlapped, so that the worker publishes the extrapolated y."""
    probes: bool = False
    """Whether the prediction for the gradients handed over in this step is measured."""
    arrives_later: bool = False
    """Whether exact weights arrive after the step."""

    @property
    def waits_first(self) -> bool:
        return self.source is not WeightSource.DRIFTED

    @property
    def waits_last(self) -> bool:
        return self.weights_arrive and not self.arrives_later

    @property
    def weights_arrive(self) -> bool:
        return self.source is WeightSource.EXACT


@dataclass(frozen=True)
class PredictiveState(State):
    """The position in the schedule."""

    is_ahead: bool = False
    """Whether the worker has published the extrapolated y and the per-block array, which overlapped
    steps need."""
    guard: GuardState = field(default_factory=GuardState)
    is_exact: bool = False
    """Whether steps follow the exact rule, so none overlaps."""


class PredictiveSchedule(Schedule[PredictivePlan, PredictiveState]):
    """Advances through the steps.

    Args:
        interval: optimizer steps handed over together; None: the caller measures during warm-up and
            then calls `choose_interval`.
        overlap: False makes every step synchronous.
        warm_up_steps: synchronous steps at the start, at least an interval; None:
            `default_warm_up_steps`.
        guarded: whether the guard judges probes.
        arrival: when gradients reach the ring.
        weights_arrive: when exact weights arrive, if steps never overlap.
    """

    def __init__(
        self,
        interval: int | None,
        overlap: bool,
        warm_up_steps: int | None,
        guarded: bool = False,
        arrival: Arrival = Arrival.AFTER_Y,
        weights_arrive: WeightsArrival = WeightsArrival.IN_STEP,
    ) -> None:
        super().__init__(PredictiveState(interval=interval, is_exact=not overlap))
        self._arrives_later = weights_arrive is WeightsArrival.IN_FORWARD
        self._arrival = arrival
        self._overlap = overlap
        self._warm_up_steps = warm_up_steps
        self._guarded = guarded and self._overlap
        self._measured_from = 0

    @property
    def warm_up_steps(self) -> int:
        """Synchronous steps at the start; at least one interval, because the estimate needs second
        moments."""
        interval, wanted = self.state.interval, self._warm_up_steps
        wanted = default_warm_up_steps(interval) if wanted is None else wanted
        return max(wanted, interval or MEASURED_STEPS + 1)

    def ring_at(self, interval: int | None) -> int:
        return ring_of(interval or 1, self._arrival) if self._overlap else 1

    def plan(self) -> PredictivePlan:
        state, guard = self.state, self.state.guard
        overlaps = not (state.is_exact or guard.synchronous)
        if (
            not overlaps
            or not state.is_ahead
            or state.interval is None
            or state.steps < self.warm_up_steps
        ):
            ahead = (
                overlaps and state.interval is not None and state.steps + 1 >= self.warm_up_steps
            )
            probes = guard.synchronous and guard.is_due
            return PredictivePlan(
                state.position + 1,
                WeightSource.EXACT,
                state.position,
                ahead,
                probes,
                state.is_exact and self._arrives_later,
            )
        last = state.position == state.interval - 1
        source = WeightSource.PREDICTED if last else WeightSource.DRIFTED
        return PredictivePlan(
            state.interval if last else 0, source, state.position, True, last and guard.is_due
        )

    def advance(self, plan: PredictivePlan) -> None:
        state = self.state
        handed_over = plan.handed_over > 0
        self.state = replace(
            state,
            steps=state.steps + 1,
            position=0 if handed_over else state.position + 1,
            written=state.written + 1,
            is_ahead=plan.publish_ahead,
            guard=state.guard.handed_over(plan.handed_over, plan.probes)
            if handed_over
            else state.guard,
        )

    @property
    def wants_verdict(self) -> bool:
        """Whether the newest hand-over is probed: then call `judge` before the next one is
        planned."""
        return self._guarded and self.state.guard.probed

    @property
    def is_settled(self) -> bool:
        """As for all schedules, and no probe waits for its verdict."""
        return super().is_settled and not self.wants_verdict

    def judge(self, excess: float) -> bool:
        """Give the guard the probe's result, and return whether this changes the coming steps.

        Args:
            excess: see `GuardState.judged`; the same on every rank.
        """
        before = self.state.guard
        self.state = replace(self.state, guard=before.judged(excess))
        return self.state.guard.synchronous is not before.synchronous

    def load_state_dict(self, state: Mapping[str, Any], position: int) -> None:
        """As for all schedules. If the guard is now off, steps that it had made synchronous overlap
        again. A rule that is known here stays."""
        guard = GuardState(**dict(state["guard"]))
        is_released = guard.synchronous and not self._guarded
        super().load_state_dict(
            {
                **state,
                "guard": GuardState() if is_released else guard,
                "is_exact": self.state.is_exact,
            },
            position,
        )
        self._measured_from = self.state.steps

    def restart(self) -> None:
        is_exact = self.state.is_exact
        super().restart()
        self.state = replace(self.state, is_exact=is_exact)
        self._measured_from = 0

    @property
    def wants_interval(self) -> bool:
        """Whether enough steps have been measured since the start or the load to call
        `choose_interval`."""
        measured = self.state.steps - self._measured_from
        return self._overlap and self.state.interval is None and measured >= MEASURED_STEPS
