"""Reads the predictive rule's settings from the ``zenflow`` section."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.zenflow.plan.arrays import PerBlock
from deepspeed_ext.zenflow.plan.places import Arrival, Place, Places
from deepspeed_ext.zenflow.plan.rule import RuleSettings
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE
from deepspeed_ext.zenflow.worker.kernel.state_layout import StateLayout

__all__ = ["PredictiveSettings", "slots_at"]


def slots_at(arrival: Arrival) -> int:
    """Number of slots for gradients that overlapped steps need.

    Note: [the slot of y]
    y replaces the gradient that went into it, in its slot. The slot may be reused once the step has
    read y, so not if the next gradient arrives before that.
    """
    return 1 if arrival is Arrival.AFTER_Y else 2


@dataclass(frozen=True)
class PredictiveSettings(RuleSettings):
    """Settings of the predictive rule."""

    overlapped: bool
    warm_up_steps: int | None
    """None: the schedule chooses."""
    prediction_error_factor: float
    """0: no guard."""

    @classmethod
    def of(cls, config: ZenFlowConfig, *, layout: StateLayout = ADAM_STATE) -> PredictiveSettings:
        """Read the settings from a section."""
        return cls(
            update_interval=1,
            overlapped=config.overlapped,
            warm_up_steps=config.warm_up_steps,
            block_size=config.block_size,
            prediction_error_factor=config.prediction_error_factor,
            layout=layout,
        )

    @property
    def shortest_interval(self) -> int:
        return 1

    @property
    def longest_interval(self) -> int:
        return 1

    def ring_at(self, interval: int | None, arrival: Arrival) -> int:
        return slots_at(arrival) if self.overlapped else 1

    @property
    def steps_each_gradient(self) -> bool:
        return True

    @property
    def estimates(self) -> bool:
        return self.overlapped

    @property
    def steps_beside_worker(self) -> bool:
        return False

    def per_block(self, places: Places) -> PerBlock:
        """What the estimate is made from, copied to the accelerator if estimates run there."""
        goes_there = self.overlapped and places.gradient is Place.ACCELERATOR
        return PerBlock(*self.layout.per_block, exchanged=goes_there)
