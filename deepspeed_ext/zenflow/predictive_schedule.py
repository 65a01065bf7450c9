"""Which optimizer step does what under the predictive rule: a state machine over plain values.

``overlapped``: the worker carries out an interval's gradients while the accelerator runs the next interval; weights in
between are predicted. ``synchronous`` (warm-up steps, or overlap turned off): every step waits for its own update.

Example, interval 2, one warm-up step; ``>`` hands over, ``<`` waits for what was handed over before::

    step        1           2         3           4         5
    weights     exact       drifted   predicted   drifted   predicted
    worker      > < step 1            < >                   < >
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from deepspeed_ext.zenflow.schedule import MEASURED_STEPS, Schedule, State

__all__ = ["PredictiveSchedule", "ScheduleState", "StepPlan", "WeightRule"]


class WeightRule(enum.Enum):
    """Where the weights of a step come from."""

    EXACT = "exact"
    """W = 16bit(p): hand over this step's gradient, wait for its update, take it."""
    DRIFTED = "drifted"
    """W moves by the estimated effect of this step's gradient, which waits for the end of its interval."""
    PREDICTED = "predicted"
    """W = 16bit(y - effect of the interval's gradients): wait for the update in flight, then hand over the next."""


@dataclass(frozen=True)
class StepPlan:
    """What one optimizer step does."""

    rule: WeightRule
    slot: int
    position: int
    """Where this step's gradient goes: its place within the slot."""
    handed_over: int
    """How many gradients go to the worker at this step: 0, 1 or the interval."""
    publish_ahead: bool
    """Whether steps after this one are overlapped: the worker then publishes the extrapolated y."""

    @property
    def waits_first(self) -> bool:
        """Whether the update in flight must have arrived before the weights can be computed."""
        return self.rule is not WeightRule.DRIFTED


@dataclass(frozen=True)
class ScheduleState(State):
    """The position in the schedule; goes into checkpoints."""

    slot: int = 0
    """Which of the two halves of the gradients' room is being filled."""


class PredictiveSchedule(Schedule[StepPlan, ScheduleState]):
    """Walks through the steps.

    Args:
        interval: optimizer steps handed over together; None: the caller measures during warm-up and then calls
            `choose_interval`.
        overlap: False makes every step synchronous.
        warm_up_steps: synchronous steps at the start; None: one, or five intervals when the interval is not 1.
    """

    def __init__(self, interval: int | None, overlap: bool, warm_up_steps: int | None) -> None:
        super().__init__(ScheduleState(interval=interval))
        self._overlap = overlap
        self._warm_up_steps = warm_up_steps

    @property
    def warm_up_steps(self) -> int:
        """Synchronous steps at the start. Never less than an interval: the estimate needs second moments."""
        interval = self.state.interval
        if interval is None:
            return max(self._warm_up_steps or 0, MEASURED_STEPS + 1)
        if self._warm_up_steps is None:
            return 1 if interval == 1 else 5 * interval
        return max(self._warm_up_steps, interval)

    def plan(self) -> StepPlan:
        """What the coming step does."""
        state = self.state
        if not self._overlap or state.steps < self.warm_up_steps or state.interval is None:
            ahead = self._overlap and state.interval is not None and state.steps + 1 >= self.warm_up_steps
            return StepPlan(WeightRule.EXACT, state.slot, 0, 1, ahead)
        last = state.position == state.interval - 1
        rule = WeightRule.PREDICTED if last else WeightRule.DRIFTED
        return StepPlan(rule, state.slot, state.position, state.interval if last else 0, True)

    def advance(self, plan: StepPlan) -> None:
        """The step that `plan` describes has been carried out."""
        state = self.state
        handed_over = plan.handed_over > 0
        self.state = replace(
            state,
            steps=state.steps + 1,
            slot=1 - state.slot if handed_over else state.slot,
            position=0 if handed_over else state.position + 1,
        )

    @property
    def wants_interval(self) -> bool:
        """Whether enough steps have been measured for `choose_interval`."""
        return self._overlap and self.state.interval is None and self.state.steps >= MEASURED_STEPS
