"""Schedules the selective rule: a state machine over plain values.

During warm-up every step is an exact step of all blocks. After it, hot blocks step on the
accelerator at every step, and gradients of cold blocks are collected. At the end of an interval the
worker makes one step with their mean. Its result is applied at once (no overlap) or `lag` steps
later. A step that selects hot blocks again waits for everything.

Example with one warm-up step, interval 3, lag 1 and a selection every 6 steps; ``>`` hands over,
``<`` applies::

    step        1      2    3    4    5    6    7     8    9    10
    blocks      all    hot  hot  hot  hot  hot  hot   hot  hot  hot
    worker      > <              >    <         > <             >
    selection   *                               *
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from deepspeed_ext.zenflow.plan.places import Arrival
from deepspeed_ext.zenflow.plan.selective import SelectiveSettings
from deepspeed_ext.zenflow.step.schedule import Schedule, State, StepPlan

__all__ = ["SelectivePlan", "SelectiveSchedule", "SelectiveState"]


@dataclass(frozen=True)
class SelectivePlan(StepPlan):
    """Describes one optimizer step."""

    exact: bool
    """True: all blocks step on the host. False: hot blocks step on the accelerator."""
    applies: bool
    """The result of an earlier hand-over is applied."""
    waits: bool
    """The step waits for the result of its own hand-over and applies it."""
    selects: bool
    """Hot blocks are selected again, from this step's gradient."""

    @property
    def waits_first(self) -> bool:
        return self.applies

    @property
    def waits_last(self) -> bool:
        return self.waits


@dataclass(frozen=True)
class SelectiveState(State):
    """The position in the schedule."""

    steps_in_flight: int | None = None
    """Steps since the hand-over whose result is not applied yet; None: nothing is in flight."""
    since_selection: int = 0
    """Optimizer steps since the hot blocks were chosen."""


class SelectiveSchedule(Schedule[SelectivePlan, SelectiveState]):
    """Advances through the steps.

    Args:
        settings: settings of the rule. If they leave the interval open, call `choose_interval` at
            the end of the warm-up, which has at least one step.
        arrival: when gradients reach the ring.
    """

    def __init__(self, settings: SelectiveSettings, arrival: Arrival = Arrival.AFTER_Y) -> None:
        super().__init__(SelectiveState(interval=settings.update_interval))
        self._settings = settings
        self._arrival = arrival

    @property
    def warm_up_steps(self) -> int:
        return self._settings.warm_up_steps

    def ring_at(self, interval: int | None) -> int:
        return self._settings.ring_at(interval, self._arrival)

    def plan(self) -> SelectivePlan:
        state = self.state
        if state.steps < self.warm_up_steps:
            selects = state.steps + 1 == self.warm_up_steps
            return SelectivePlan(1, exact=True, applies=False, waits=True, selects=selects)
        assert state.interval is not None, "the interval is settled at the end of the warm-up"
        lag, every = self._settings.lag, self._settings.steps_between_selections(state.interval)
        last = state.position == state.interval - 1
        selects = last and every > 0 and state.since_selection + 1 >= every
        applies = state.steps_in_flight is not None and state.steps_in_flight + 1 == lag
        waits = last and (lag is None or selects)
        return SelectivePlan(
            state.interval if last else 0,
            exact=False,
            applies=applies,
            waits=waits,
            selects=selects,
        )

    def advance(self, plan: SelectivePlan) -> None:
        state = self.state
        in_flight = (
            None if state.steps_in_flight is None or plan.applies else state.steps_in_flight + 1
        )
        if plan.handed_over and not plan.waits:
            in_flight = 0
        self.state = replace(
            state,
            steps=state.steps + 1,
            position=0 if plan.handed_over else state.position + 1,
            written=state.written + 1,
            steps_in_flight=in_flight,
            since_selection=0 if plan.selects else state.since_selection + 1,
        )
