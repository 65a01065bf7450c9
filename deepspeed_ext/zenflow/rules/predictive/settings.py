"""Reads the predictive rule's settings from the ``zenflow`` section."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.errors import ConfigError
from deepspeed_ext.zenflow.rules.predictive.schedule import ring_of
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE, DTYPE_BYTES
from deepspeed_ext.zenflow.worker.kernel.state_layout import StateLayout
from deepspeed_ext.zenflow.worker.sizes import RuleSettings

__all__ = ["LONGEST_MEASURED", "PredictiveSettings"]

LONGEST_MEASURED = 2
"""Longest interval chosen by measurement. Interval 4 raises the loss by 7 % with larger batches (docs/results.md),
so only a config may choose it."""


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
        """Read the settings from a section.

        Raises:
            ConfigError: overlapped steps have an interval for which the optimizer has no estimate.
        """
        interval, longest = config.interval, layout.longest_interval
        if config.overlapped and longest is not None:
            if interval is not None and interval > longest:
                raise ConfigError(
                    f"zero_optimization.zenflow.update_interval = {interval} with {layout.name.capitalize()}: the "
                    f"estimate for it has been measured at {longest} only (docs/results.md). Set the interval to "
                    f"{longest} or leave it out"
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
    def longest_interval(self) -> int:
        return self.update_interval or LONGEST_MEASURED

    @property
    def slots(self) -> int:
        return ring_of(self.longest_interval, self.fills_early, self.fills_before_y) if self.overlapped else 1

    @property
    def least_slots(self) -> int:
        return ring_of(1, self.fills_early, self.fills_before_y) if self.overlapped else 1

    @property
    def passes_chunks(self) -> bool:
        """With one gradient at a time, at least until the interval is measured, and weights on the accelerator."""
        one = self.least_slots if self.update_interval is None else self.slots
        return one == 1 and not (self.fills_early or self.fills_before_y)

    @property
    def per_block(self) -> tuple[str, str, bool]:
        """What the estimate is made from, copied to the accelerator if that computes it."""
        return (*self.layout.per_block, not self.fills_early)

    def accelerator_bytes(self, numel: int, weights_bytes: int) -> int:
        """The estimate's value of each block, and D."""
        if not self.overlapped or self.fills_early:
            return 0
        remembered = DTYPE_BYTES["float32"] * -(-numel // self.block_size) * self.per_block_width
        return remembered + (numel * weights_bytes if self.drifts else 0)

    @property
    def drifts(self) -> bool:
        """Whether D is kept: the interval is, or may become, longer than one step."""
        return self.overlapped and self.update_interval != 1

    @property
    def with_drift(self) -> tuple[bool, ...]:
        """Whether estimates use D; both values while the interval is not chosen yet, because some then do."""
        return (True, False) if self.overlapped and self.update_interval is None else (self.drifts,)
