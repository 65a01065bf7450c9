"""Reads the predictive rule's settings from the ``zenflow`` section."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.errors import ConfigError
from deepspeed_ext.zenflow.plan.arrays import PerBlock
from deepspeed_ext.zenflow.plan.chunks import ACCELERATOR_CHUNK_NUMEL, chunk_of
from deepspeed_ext.zenflow.plan.places import Arrival, Place, Places
from deepspeed_ext.zenflow.plan.rule import RuleSettings
from deepspeed_ext.zenflow.plan.rule_bytes import FLOAT_BYTES, RuleBytes
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE
from deepspeed_ext.zenflow.worker.kernel.state_layout import StateLayout

__all__ = ["LONGEST_MEASURED", "PredictiveSettings", "ring_of"]

_SIGN_BYTES = 1
LONGEST_MEASURED = 2
"""Longest interval chosen by measurement. Interval 4 raises the loss by 7 % with larger batches
(docs/results.md), so it must be configured."""


# Note: [the slot of y]
# y replaces the newest gradient that went into it, in its slot. An interval's gradients are in
# flight while the next interval's are collected. The last of the latter may reuse a slot in flight,
# because its step waits for the worker first; but not if it arrives in backward, before its step.
# At interval 1 that is the slot of y: it may be reused once the step has read y, so not if the
# gradient arrives before that.


def ring_of(interval: int, arrival: Arrival) -> int:
    """Number of ring slots needed at `interval`, overlapped (see Note: [the slot of y])."""
    return max(
        2 * interval - (arrival is not Arrival.IN_BACKWARD), 1 if arrival is Arrival.AFTER_Y else 2
    )


@dataclass(frozen=True)
class PredictiveSettings(RuleSettings):
    """Settings of the predictive rule."""

    prediction_error_factor: float
    """0: no guard."""

    @classmethod
    def of(cls, config: ZenFlowConfig, *, layout: StateLayout = ADAM_STATE) -> PredictiveSettings:
        """Read the settings from a section.

        Raises:
            ConfigError: overlapped steps have an interval for which the optimizer has no estimate.
        """
        interval, longest = config.interval, layout.longest_interval
        if config.overlapped and longest is not None:
            if interval is not None and interval > longest:
                raise ConfigError(
                    "zero_optimization.zenflow.update_interval "
                    f"= {interval} with {layout.name.capitalize()}: its estimate is validated for "
                    f"interval {longest} only (docs/results.md). "
                    f"Set the interval to {longest} or leave it out"
                )
            interval = longest
        return cls(
            update_interval=interval,
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
        return self.update_interval or LONGEST_MEASURED

    def ring_at(self, interval: int | None, arrival: Arrival) -> int:
        return ring_of(interval or 1, arrival) if self.overlapped else 1

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
        """Kept: 1 / d_b of each block, and D. With Lion, the signs and means of m.

        Temporaries by torch operations are fp32 arrays of one chunk: for 16-bit weights three of
        `Estimator.predict`, to which y comes in parts, and four of `Estimator.move`; for others
        one, or two with D, and two. With Lion two, and a byte for each sign. A kernel needs none,
        but whether it can run is not known before the run.
        """
        if not self.overlapped:
            return RuleBytes()
        drift = {"drift": numel * weights_bytes} if self.drifts else {}
        remembered = "signs and means" if self.layout.with_signs else "derived denominators"
        entries = -(-numel // self.block_size) * self.per_block_width
        kept = {remembered: FLOAT_BYTES * entries, **drift}
        chunk = min(numel, chunk_of(ACCELERATOR_CHUNK_NUMEL, self.block_size))
        arrived = 0 if in_place else chunk * arrived_bytes
        factor = FLOAT_BYTES * -(-chunk // self.block_size)
        if self.layout.with_signs:
            step = chunk * (2 * FLOAT_BYTES + max(_SIGN_BYTES, 0 if in_place else arrived_bytes))
            return RuleBytes(kept, saved=tuple(kept.values()), step=step)
        narrow = weights_bytes < FLOAT_BYTES
        predicting = (3 if narrow else 2 if self.drifts else 1) * FLOAT_BYTES * chunk
        moving = (4 if narrow else 2) * FLOAT_BYTES * chunk if self.drifts else 0
        step = max(predicting + max(arrived, factor), moving + factor)
        return RuleBytes(kept, saved=tuple(kept.values()), step=step)

    @property
    def drifts(self) -> bool:
        """Whether D is kept: the interval is, or may become, longer than one step."""
        return self.overlapped and self.update_interval != 1

    @property
    def with_drift(self) -> tuple[bool, ...]:
        """Whether estimates use D; both values until the interval is chosen."""
        return (True, False) if self.overlapped and self.update_interval is None else (self.drifts,)
