"""Reads the selective rule's settings from the ``zenflow`` section."""

from __future__ import annotations

import math
from dataclasses import dataclass

from deepspeed_ext._errors import ConfigError
from deepspeed_ext._logging import logger
from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.zenflow.schedule import MEASURED_INTERVAL_LIMIT

__all__ = ["SelectiveSettings", "ring_of"]

_AUTO_SELECT_STEPS = 16


def ring_of(interval: int, lag: int) -> int:
    """Number of ring slots needed: an interval's gradients stay in flight for `lag` steps, and the last of these
    waits before it writes its own gradient."""
    return interval + max(0, lag - 1)


@dataclass(frozen=True)
class SelectiveSettings:
    """Settings of the selective rule, as plain values; see the fields of the same names in `ZenFlowConfig`."""

    update_interval: int | None
    lag: int | None
    """Optimizer steps from a hand-over to applying its result; None: not overlapped, the step waits for its own
    result."""
    warm_up_steps: int
    block_size: int
    topk_ratio: float
    select_every_steps: int | None
    """Optimizer steps between selections, before rounding up to whole intervals; 0: select once; None: derived from
    the interval."""
    keeps_hot_on_host: bool
    auto_ratio: float

    @classmethod
    def of(cls, config: ZenFlowConfig) -> SelectiveSettings:
        """Read the settings from a section.

        Raises:
            ConfigError: intervals contradict each other.
        """
        settings = cls(
            update_interval=config.update_interval,
            lag=config.overlap_lag if config.overlapped else None,
            warm_up_steps=max(1, config.full_warm_up_rounds),
            block_size=config.select_block_size,
            topk_ratio=config.topk_ratio,
            select_every_steps=_select_every_steps(config),
            keeps_hot_on_host=config.offload,
            auto_ratio=config.auto_ratio,
        )
        settings.steps_between_selections(settings.update_interval or 1)
        if settings.lag and settings.update_interval and settings.lag > settings.update_interval:
            raise ConfigError(
                f"zero_optimization.zenflow.overlap_lag = {settings.lag} is more than update_interval = "
                f"{settings.update_interval}, but a result must be applied before the next hand-over: lower overlap_lag"
            )
        return settings

    @property
    def slots(self) -> int:
        """Slots of the gradient ring. If the interval is chosen later, enough for the longest one."""
        lag = self.lag or 0
        return ring_of(self.update_interval or max(MEASURED_INTERVAL_LIMIT, lag), lag)

    @property
    def per_block(self) -> tuple[str, str, bool]:
        """The per-block array: update counts, which stay on the host."""
        return ("updates", "int32", False)

    def steps_between_selections(self, interval: int) -> int:
        """Optimizer steps between two selections of hot blocks.

        Returns:
            A multiple of `interval`; 0: select only once.

        Raises:
            ConfigError: the config asks for fewer than `interval` steps.
        """
        steps = self.select_every_steps
        if steps is None:
            steps = max(_AUTO_SELECT_STEPS, 4 * interval)
        if 0 < steps < interval:
            raise ConfigError(
                f"zero_optimization.zenflow selects hot blocks every {steps} steps, which is less than "
                f"update_interval = {interval}: raise select_interval or lower update_interval"
            )
        return math.ceil(steps / interval) * interval


def _select_every_steps(config: ZenFlowConfig) -> int | None:
    given, strategy = config.select_interval, config.select_strategy
    if strategy == "step" and given is None:
        raise ConfigError(
            'zero_optimization.zenflow.select_strategy = "step" needs select_interval, the number of optimizer steps '
            'between two selections: set it, or set select_strategy to "auto"'
        )
    if strategy != "epoch":
        return given
    if not config.steps_per_epoch:
        logger.warning(
            'zenflow.select_strategy = "epoch": the length of an epoch is known only if deepspeed.initialize is '
            "given training_data; hot blocks are selected once. Set select_strategy = step and select_interval"
        )
    return (given or 1) * (config.steps_per_epoch or 0)
