"""Reads the predictive rule's settings from the ``zenflow`` section."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.zenflow.predictive.schedule import ring_of
from deepspeed_ext.zenflow.schedule import MEASURED_INTERVAL_LIMIT

__all__ = ["PredictiveSettings"]


@dataclass(frozen=True)
class PredictiveSettings:
    """Settings of the predictive rule, as plain values; see the fields of the same names in `ZenFlowConfig`."""

    update_interval: int | None
    overlapped: bool
    warm_up_steps: int | None
    """None: the schedule chooses."""
    block_size: int

    @classmethod
    def of(cls, config: ZenFlowConfig) -> PredictiveSettings:
        """Read the settings from a section."""
        return cls(
            update_interval=config.update_interval,
            overlapped=config.overlapped,
            warm_up_steps=config.warm_up_steps,
            block_size=config.block_size,
        )

    @property
    def slots(self) -> int:
        """Slots of the gradient ring. If the interval is chosen later, enough for the longest one."""
        if not self.overlapped:
            return 1
        return ring_of(self.update_interval or MEASURED_INTERVAL_LIMIT)

    @property
    def per_block(self) -> tuple[str, str, bool]:
        """The per-block array: means of v, which are copied to the accelerator."""
        return ("block_means", "float32", True)
