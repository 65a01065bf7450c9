"""Defines what the schedules of both rules share.

A schedule is a state machine over plain values. For each optimizer step it says what is handed
over, awaited and applied. Overflowed steps neither query nor advance the schedule.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from deepspeed_ext.zenflow.plan.places import Wait

__all__ = ["Schedule", "State", "StepPlan"]


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """Describes one optimizer step.

    Attributes:
        wait: what waits for the worker's results.
        handed_over: gradients handed over in this step: 0 or 1.
        predicts: whether the step computes its weights from y and an estimate.
        waits_first: whether the update in flight must arrive before this step's weights are
            computed.
    """

    wait: Wait
    handed_over: int = 1
    predicts: bool = False
    waits_first: bool = True

    @property
    def waits_last(self) -> bool:
        """Whether this step waits for the update that it hands over."""
        return self.wait is Wait.STEP and not self.predicts


@dataclass(frozen=True)
class State:
    """The position in a schedule."""

    steps: int = 0
    """Optimizer steps so far; overflowed steps do not count."""
    written: int = 0
    """Gradients handed over so far."""


class Schedule(ABC):
    """Advances step by step: `plan` describes the coming step, `advance` records that it was
    carried out.

    Attributes:
        state: the position.
        ring: number of slots that gradients take in turn.
    """

    state: Any
    ring: int

    @abstractmethod
    def plan(self) -> Any:
        """Describe the coming step: a `StepPlan`."""

    @abstractmethod
    def advance(self, plan: Any) -> None:
        """Record that the step described by `plan` was carried out."""

    @property
    @abstractmethod
    def warm_up_steps(self) -> int:
        """Synchronous steps at the start."""

    @property
    def coming(self) -> int:
        """Slot for the coming step's gradient; free once that step has waited."""
        slot: int = self.state.written % self.ring
        return slot

    @property
    def handed_over(self) -> int:
        """Slot of the newest gradient that was handed over. It holds y until the slot's next
        gradient."""
        slot: int = (self.state.written - 1) % self.ring
        return slot

    @property
    def is_settled(self) -> bool:
        """Whether, after the update in flight has arrived, nothing refers to elements of the
        arena."""
        return True

    def restart(self) -> None:
        """Start over with synchronous steps."""
        self.state = type(self.state)()

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values. A resumed run begins with the first slot."""
        return {name: value for name, value in asdict(self.state).items() if name != "written"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.state = type(self.state)(**state)
