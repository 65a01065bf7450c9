"""Reads the predictive rule's settings from the ``zenflow`` section."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.errors import ConfigError
from deepspeed_ext.zenflow.rules.predictive.schedule import ring_of
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE
from deepspeed_ext.zenflow.worker.kernel.state_layout import StateLayout

__all__ = ["LONGEST_MEASURED", "PredictiveSettings"]

LONGEST_MEASURED = 2
"""Longest interval chosen by measurement. Interval 4 raises the loss by 7 % with larger batches (docs/lab/numerics.md),
so only a config may choose it."""


@dataclass(frozen=True)
class PredictiveSettings:
    """Settings of the predictive rule, as plain values; see the fields of the same names in `ZenFlowConfig`."""

    update_interval: int | None
    overlapped: bool
    warm_up_steps: int | None
    """None: the schedule chooses."""
    block_size: int
    prediction_error_factor: float
    """0: no guard."""
    weights_on_host: bool = False
    """Weights are on the host (``offload_param``)."""
    fills_early: bool = False
    """Gradients are in the ring before their step begins, and the host computes the weights (``gradients_on_host``, and
    with weights on the host)."""
    fills_before_y: bool = False
    """Gradients are made on the host, and may be in the ring before their step reads y (the CPU is the
    accelerator)."""
    layout: StateLayout = ADAM_STATE
    """The optimizer's state."""

    @classmethod
    def of(
        cls,
        config: ZenFlowConfig,
        *,
        weights_on_host: bool = False,
        fills_early: bool = False,
        fills_before_y: bool = False,
        layout: StateLayout = ADAM_STATE,
    ) -> PredictiveSettings:
        """Read the settings from a section; the other arguments as the attributes.

        Raises:
            ConfigError: overlapped steps have an interval for which the optimizer has no estimate.
        """
        interval, longest = config.update_interval, layout.longest_interval
        if config.overlapped and longest is not None:
            if interval is not None and interval > longest:
                raise ConfigError(
                    f"zero_optimization.zenflow.update_interval = {interval} with {layout.name.capitalize()}: the "
                    f"estimate for it has been measured at {longest} only (docs/lab/numerics.md). Set the interval to "
                    f"{longest} or leave it out"
                )
            interval = longest
        return cls(
            update_interval=interval,
            overlapped=config.overlapped,
            warm_up_steps=config.warm_up_steps,
            block_size=config.block_size,
            prediction_error_factor=config.prediction_error_factor,
            weights_on_host=weights_on_host,
            fills_early=fills_early,
            fills_before_y=fills_before_y,
            layout=layout,
        )

    @property
    def longest_interval(self) -> int:
        """`update_interval`, or the longest interval that measurement may choose."""
        return self.update_interval or LONGEST_MEASURED

    @property
    def slots(self) -> int:
        """Slots of the gradient ring at `longest_interval`."""
        return ring_of(self.longest_interval, self.fills_early, self.fills_before_y) if self.overlapped else 1

    @property
    def least_slots(self) -> int:
        """Slots in use while the interval is open: those of interval 1."""
        return ring_of(1, self.fills_early, self.fills_before_y) if self.overlapped else 1

    @property
    def passes_chunks(self) -> bool:
        """Whether gradients and y may pass through the host chunk by chunk: with one gradient at a time, at least until
        the interval is measured, and weights on the accelerator."""
        one = self.least_slots if self.update_interval is None else self.slots
        return one == 1 and not (self.fills_early or self.fills_before_y)

    @property
    def per_block(self) -> tuple[str, str, bool]:
        """The per-block array: what the estimate is made from, copied to the accelerator if that computes it."""
        return (*self.layout.per_block, not self.fills_early)

    @property
    def per_block_width(self) -> int:
        """Elements of that array for one block."""
        return self.layout.per_block_width(self.block_size)

    @property
    def drifts(self) -> bool:
        """Whether D is kept: the interval is, or may become, longer than one step."""
        return self.overlapped and self.update_interval != 1

    @property
    def with_drift(self) -> tuple[bool, ...]:
        """Whether estimates use D; both values while the interval is not chosen yet, because some then do."""
        return (True, False) if self.overlapped and self.update_interval is None else (self.drifts,)
