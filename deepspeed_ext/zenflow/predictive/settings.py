"""What the predictive rule reads of the ``zenflow`` section, as plain values."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.zenflow.predictive.schedule import ring_of
from deepspeed_ext.zenflow.schedule import MEASURED_INTERVAL_LIMIT

__all__ = ["PredictiveSettings"]


@dataclass(frozen=True)
class PredictiveSettings:
    """Settings of the predictive rule; the fields of `ZenFlowConfig` of these names say more."""

    update_interval: int | None
    overlapped: bool
    warm_up_steps: int | None
    """None: as the schedule sees fit."""
    block_size: int
    uses_previous_clip: bool
    """The estimate uses the clip factor of the step before, so gradients can be copied during backward."""

    @classmethod
    def of(cls, config: ZenFlowConfig) -> PredictiveSettings:
        """Those of a section."""
        return cls(
            update_interval=config.update_interval,
            overlapped=config.overlapped,
            warm_up_steps=config.warm_up_steps,
            block_size=config.block_size,
            uses_previous_clip=config.predict_clip == "previous",
        )

    @property
    def slots(self) -> int:
        """Of the gradient ring; an interval that is chosen later may need all of them."""
        if not self.overlapped:
            return 1
        return ring_of(self.update_interval or MEASURED_INTERVAL_LIMIT, self.uses_previous_clip)

    @property
    def per_block(self) -> tuple[str, str, bool]:
        """The arena's array per block: means of v, which go to the accelerator."""
        return ("block_means", "float32", True)
