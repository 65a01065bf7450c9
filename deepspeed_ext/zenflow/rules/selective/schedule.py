"""Schedules the selective rule: a state machine over plain values.

During warm-up every step is an exact step of all blocks. After it, hot blocks step on the
accelerator at every step, and gradients are collected. At the end of an interval their mean is
handed over, and the worker makes one step of the cold blocks with it. Its result is applied at once
(no overlap) or in the next step. A step that selects hot blocks again waits for everything.

Example with one warm-up step, interval 3, overlapped, and a selection every 6 steps; ``>`` hands
over, ``<`` applies::

    step        1      2    3    4    5    6    7     8    9    10
    blocks      all    hot  hot  hot  hot  hot  hot   hot  hot  hot
    worker      > <              >    <         > <             >
    selection   *                               *
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from deepspeed_ext.zenflow.plan.places import Source, Wait
from deepspeed_ext.zenflow.plan.rule import SelectiveSettings
from deepspeed_ext.zenflow.step.schedule import Schedule, State, StepPlan

__all__ = ["SelectivePlan", "SelectiveSchedule", "SelectiveState"]


@dataclass(frozen=True, kw_only=True)
class SelectivePlan(StepPlan):
    """Describes one optimizer step. If it waits first, it applies the result of an earlier
    hand-over; if it waits last, that of its own.

    Attributes:
        collected: gradients of the interval before this step's.
        selects: whether hot blocks are selected again, from this step's gradient.
    """

    collected: int = 0
    selects: bool


@dataclass(frozen=True)
class SelectiveState(State):
    """The position in the schedule."""

    collected: int = 0
    """Gradients of the interval so far."""
    is_in_flight: bool = False
    """Whether a result is not applied yet."""
    since_selection: int = 0
    """Optimizer steps since the hot blocks were chosen."""


class SelectiveSchedule(Schedule):
    """Advances through the steps. Settings may change between them.

    Args:
        settings: settings of the rule.
        source: where gradients come from.
    """

    def __init__(self, settings: SelectiveSettings, source: Source = Source.COPY) -> None:
        self.state = SelectiveState()
        self.ring = settings.slots(source)
        self._settings = settings

    @property
    def warm_up_steps(self) -> int:
        assert self._settings.warm_up_steps is not None
        return self._settings.warm_up_steps

    def plan(self) -> SelectivePlan:
        state, settings = self.state, self._settings
        if state.steps < self.warm_up_steps:
            selects = state.steps + 1 == self.warm_up_steps
            return SelectivePlan(wait=Wait.STEP, waits_first=False, selects=selects)
        last, every = state.collected + 1 >= settings.interval, settings.select_every_steps
        selects = last and 0 < every <= state.since_selection + 1
        waits = last and (selects or not settings.overlapped)
        return SelectivePlan(
            wait=Wait.STEP if waits else Wait.NEXT_STEP,
            handed_over=int(last),
            waits_first=state.is_in_flight,
            collected=state.collected,
            selects=selects,
        )

    def advance(self, plan: SelectivePlan) -> None:
        state = self.state
        self.state = replace(
            state,
            steps=state.steps + 1,
            written=state.written + plan.handed_over,
            collected=0 if plan.handed_over else state.collected + 1,
            is_in_flight=bool(plan.handed_over) and not plan.waits_last,
            since_selection=0 if plan.selects else state.since_selection + 1,
        )
