"""Which optimizer step does what under the selective rule: a state machine over plain values.

After the warm-up, in which every step is an exact one of all blocks, hot blocks step on the accelerator every time and
gradients of cold ones are collected; at the end of an interval the worker makes one step of their mean, and its result
is taken over at once (no overlap) or `lag` steps later. Where the hot blocks are chosen anew, everything is awaited.

Example, one warm-up step, interval 3, lag 1, selection every 6 steps; ``>`` hands over, ``<`` takes over::

    step        1      2    3    4    5    6    7     8    9    10
    blocks      all    hot  hot  hot  hot  hot  hot   hot  hot  hot
    worker      > <              >    <         > <             >
    selection   *                               *
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from deepspeed_ext._errors import ConfigError
from deepspeed_ext._logging import logger
from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.zenflow.schedule import Schedule, State

__all__ = ["SelectivePlan", "SelectiveSchedule", "SelectiveState", "ring_of", "steps_between_selections"]

_AUTO_SELECT_STEPS = 16


@dataclass(frozen=True)
class SelectivePlan:
    """What one optimizer step does."""

    exact: bool
    """All blocks step on the host, and the step waits for them; else hot blocks step on the accelerator."""
    applies: bool
    """The result of an earlier hand-over is taken over."""
    handed_over: int
    """How many gradients go to the worker at this step: 0, 1 or the interval."""
    waits: bool
    """The result of this step's hand-over is taken over at once."""
    selects: bool
    """The hot blocks are chosen anew, by this step's gradient."""


@dataclass(frozen=True)
class SelectiveState(State):
    """The position in the schedule; goes into checkpoints."""

    in_flight: int | None = None
    """Steps since the hand-over whose result is not taken over yet; None: there is none."""
    since_selection: int = 0
    """Optimizer steps since the hot blocks were chosen."""


def ring_of(interval: int, lag: int) -> int:
    """For how many gradients there must be room: an interval's are in flight for `lag` steps, of which the last waits
    before it writes its own."""
    return interval + max(0, lag - 1)


class SelectiveSchedule(Schedule[SelectivePlan, SelectiveState]):
    """Walks through the steps.

    Args:
        settings: the ``zenflow`` section. An interval that it leaves open is settled with `choose_interval` at the end
            of the warm-up, of which at least one step is made.

    Raises:
        ConfigError: intervals that contradict one another.
    """

    def __init__(self, settings: ZenFlowConfig) -> None:
        super().__init__(SelectiveState(interval=settings.update_interval))
        self._settings = settings
        self._lag = settings.overlap_lag if settings.overlapped else None
        self._warm_up_steps = max(1, settings.full_warm_up_rounds)
        steps_between_selections(settings, settings.update_interval or 1)
        if self._lag and settings.update_interval and self._lag > settings.update_interval:
            raise ConfigError(
                f"zero_optimization.zenflow.overlap_lag = {self._lag} is more than update_interval = "
                f"{settings.update_interval}: a result must be taken over before the next is handed over"
            )

    @property
    def ring(self) -> int:
        return 1 if self.state.interval is None else ring_of(self.state.interval, self._lag or 0)

    def plan(self) -> SelectivePlan:
        """What the coming step does."""
        state = self.state
        if state.steps < self._warm_up_steps:
            return SelectivePlan(True, False, 1, True, state.steps + 1 == self._warm_up_steps)
        assert state.interval is not None, "the interval is settled at the end of the warm-up"
        last = state.position == state.interval - 1
        every = steps_between_selections(self._settings, state.interval)
        selects = last and every > 0 and state.since_selection + 1 >= every
        applies = state.in_flight is not None and state.in_flight + 1 == self._lag
        return SelectivePlan(
            False, applies, state.interval if last else 0, last and (self._lag is None or selects), selects
        )

    def advance(self, plan: SelectivePlan) -> None:
        """The step that `plan` describes has been carried out."""
        state = self.state
        in_flight = None if state.in_flight is None or plan.applies else state.in_flight + 1
        if plan.handed_over and not plan.waits:
            in_flight = 0
        self.state = replace(
            state,
            steps=state.steps + 1,
            position=0 if plan.handed_over else state.position + 1,
            written=state.written + 1,
            in_flight=in_flight,
            since_selection=0 if plan.selects else state.since_selection + 1,
        )


def steps_between_selections(settings: ZenFlowConfig, interval: int) -> int:
    """After how many optimizer steps the hot blocks are chosen anew: a multiple of `interval`, or 0 for never.

    ``auto`` without a number is 16 steps, and four intervals at least; ``epoch`` needs to know how long an epoch is.

    Raises:
        ConfigError: ``step`` without a number, or a number below the interval.
    """
    given, strategy = settings.select_interval, settings.select_strategy
    if strategy == "step" and given is None:
        raise ConfigError(
            'zero_optimization.zenflow.select_strategy = "step" needs select_interval, the number of optimizer steps '
            'between two selections: give it, or set select_strategy to "auto"'
        )
    if strategy == "epoch":
        steps = (given or 1) * (settings.steps_per_epoch or 0)
    else:
        steps = given or max(_AUTO_SELECT_STEPS, 4 * interval)
    if 0 < steps < interval:
        raise ConfigError(
            f"zero_optimization.zenflow: the hot share is to be selected every {steps} steps, which is less than "
            f"update_interval = {interval}: raise select_interval or lower update_interval"
        )
    return math.ceil(steps / interval) * interval


def warn_of_unknown_epoch(settings: ZenFlowConfig) -> None:
    """Tell a user who selects by epoch that nobody knows how long one is."""
    if settings.select_strategy == "epoch" and not settings.steps_per_epoch:
        logger.warning(
            'zenflow.select_strategy = "epoch": the length of an epoch is known only where deepspeed.initialize is '
            "given training_data; the hot share is selected once. Give select_strategy = step and select_interval"
        )
