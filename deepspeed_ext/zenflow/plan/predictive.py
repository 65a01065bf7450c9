"""Reads the predictive rule's settings from the ``zenflow`` section."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.zenflow.plan.arrays import PerBlock
from deepspeed_ext.zenflow.plan.chunks import ACCELERATOR_CHUNK_NUMEL, chunk_of
from deepspeed_ext.zenflow.plan.places import Arrival, Place, Places
from deepspeed_ext.zenflow.plan.rule import RuleSettings
from deepspeed_ext.zenflow.plan.rule_bytes import FLOAT_BYTES, RuleBytes
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE
from deepspeed_ext.zenflow.worker.kernel.passes import StateLayout

__all__ = ["PredictiveSettings", "slots_at"]

_SIGN_BYTES = 1


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

    prediction_error_factor: float
    """0: no guard."""

    @classmethod
    def of(cls, config: ZenFlowConfig, *, layout: StateLayout = ADAM_STATE) -> PredictiveSettings:
        """Read the settings from a section."""
        return cls(
            overlapped=config.overlapped,
            warm_up_steps=config.warm_up_steps,
            block_size=config.block_size,
            prediction_error_factor=config.prediction_error_factor,
            layout=layout,
        )

    def slots(self, arrival: Arrival) -> int:
        return slots_at(arrival) if self.overlapped else 1

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

    def nbytes(
        self,
        numel: int,
        weights_bytes: int = 0,
        *,
        arrived_bytes: int = 0,
        in_place: bool = False,
    ) -> RuleBytes:
        """Kept: 1 / d_b of each block. With Lion, the signs and means of m.

        Temporaries by torch operations are fp32 arrays of one chunk: for 16-bit weights three of
        `Estimator.predict`, to which y comes in parts, for others one. With Lion two, and a byte
        for each sign. A kernel needs none, but whether it can run is not known before the run.
        """
        if not self.overlapped:
            return RuleBytes()
        remembered = "signs and means" if self.layout.with_signs else "derived denominators"
        entries = -(-numel // self.block_size) * self.per_block_width
        kept = {remembered: FLOAT_BYTES * entries}
        chunk = min(numel, chunk_of(ACCELERATOR_CHUNK_NUMEL, self.block_size))
        arrived = 0 if in_place else chunk * arrived_bytes
        factor = FLOAT_BYTES * -(-chunk // self.block_size)
        if self.layout.with_signs:
            step = chunk * (2 * FLOAT_BYTES + max(_SIGN_BYTES, 0 if in_place else arrived_bytes))
            return RuleBytes(kept, saved=tuple(kept.values()), step=step)
        narrow = weights_bytes < FLOAT_BYTES
        step = (3 if narrow else 1) * FLOAT_BYTES * chunk + max(arrived, factor)
        return RuleBytes(kept, saved=tuple(kept.values()), step=step)
