"""Schedules the predictive rule: a state machine over plain values.

Overlapped steps: the worker processes a step's gradient while the accelerator runs the next step,
whose weights are predicted. Synchronous steps (during warm-up, while the guard is tripped, or
always if overlap is off): every step waits for its own update.

Example with one warm-up step; ``>`` hands over, ``<`` waits for what was handed over before::

    step        1           2           3
    weights     exact       predicted   predicted
    worker      > <         >           < >
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from deepspeed_ext.zenflow.plan.places import Source, Wait
from deepspeed_ext.zenflow.plan.rule import slots_at
from deepspeed_ext.zenflow.rules.predictive.guard import GuardState
from deepspeed_ext.zenflow.step.schedule import Schedule, State, StepPlan

__all__ = [
    "PredictivePlan",
    "PredictiveSchedule",
    "PredictiveState",
]

_WARM_UP_STEPS = 10
"""Synchronous steps at the start, while the moments have seen too few gradients to predict from:
the measured need (docs/results.md)."""


@dataclass(frozen=True, kw_only=True)
class PredictivePlan(StepPlan):
    """Describes one optimizer step.

    If it predicts, W = round(y - effect of the gradient), where y is the result of the update
    before. Otherwise W = round(p), which the worker gives for this step's gradient.

    Attributes:
        publish_ahead: whether the next step is predicted, so the worker publishes the extrapolated
            y.
        probes: whether the prediction for the gradient handed over in this step is measured.
    """

    publish_ahead: bool
    probes: bool = False


@dataclass(frozen=True)
class PredictiveState(State):
    """The position in the schedule."""

    is_ahead: bool = False
    """Whether the worker has published the extrapolated y and the per-block array, which overlapped
    steps need."""
    guard: GuardState = field(default_factory=GuardState)
    is_exact: bool = False
    """Whether steps follow the exact rule, so none overlaps."""


class PredictiveSchedule(Schedule):
    """Advances through the steps.

    Args:
        overlap: False makes every step synchronous.
        warm_up_steps: synchronous steps at the start, at least one; None: `_WARM_UP_STEPS`.
        guarded: whether the guard judges probes.
        source: where gradients come from.
        wait: what waits for weights that arrive: exact ones, if steps never overlap.
        in_chunks: whether predicted ones arrive, too; otherwise their step writes them.
    """

    def __init__(
        self,
        overlap: bool,
        warm_up_steps: int | None,
        guarded: bool = False,
        source: Source = Source.COPY,
        wait: Wait = Wait.STEP,
        in_chunks: bool = False,
    ) -> None:
        self.state = PredictiveState(is_exact=not overlap)
        self.ring = slots_at(source) if overlap else 1
        self._wait, self._in_chunks = wait, in_chunks
        self._warm_up_steps = warm_up_steps
        self._guarded = guarded and overlap

    @property
    def warm_up_steps(self) -> int:
        """Synchronous steps at the start; at least one, because the estimate needs second
        moments."""
        return _WARM_UP_STEPS if self._warm_up_steps is None else max(1, self._warm_up_steps)

    def plan(self) -> PredictivePlan:
        state, guard = self.state, self.state.guard
        overlaps = not (state.is_exact or guard.synchronous)
        if overlaps and state.is_ahead and state.steps >= self.warm_up_steps:
            wait, probes = self._wait if self._in_chunks else Wait.NEXT_STEP, guard.is_due
            return PredictivePlan(wait=wait, predicts=True, publish_ahead=True, probes=probes)
        ahead = overlaps and state.steps + 1 >= self.warm_up_steps
        wait = self._wait if state.is_exact else Wait.STEP
        probes = guard.synchronous and guard.is_due
        return PredictivePlan(wait=wait, publish_ahead=ahead, probes=probes)

    def advance(self, plan: PredictivePlan) -> None:
        state = self.state
        self.state = replace(
            state,
            steps=state.steps + 1,
            written=state.written + 1,
            is_ahead=plan.publish_ahead,
            guard=state.guard.handed_over(plan.probes),
        )

    @property
    def wants_verdict(self) -> bool:
        """Whether the newest hand-over is probed: then call `judge` before the next one is
        planned."""
        return self._guarded and self.state.guard.probed

    @property
    def is_settled(self) -> bool:
        """Whether no probe waits for its verdict."""
        return not self.wants_verdict

    def judge(self, excess: float) -> bool:
        """Give the guard the probe's result, and return whether this changes the coming steps.

        Args:
            excess: see `GuardState.judged`; the same on every rank.
        """
        before = self.state.guard
        self.state = replace(self.state, guard=before.judged(excess))
        return self.state.guard.synchronous is not before.synchronous

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As for all schedules. If the guard is now off, steps that it had made synchronous overlap
        again. A rule that is known here stays."""
        guard = GuardState(**dict(state["guard"]))
        is_released = guard.synchronous and not self._guarded
        guard = GuardState() if is_released else guard
        kept = {"guard": guard, "is_exact": self.state.is_exact}
        super().load_state_dict({**state, **kept})

    def restart(self) -> None:
        is_exact = self.state.is_exact
        super().restart()
        self.state = replace(self.state, is_exact=is_exact)
