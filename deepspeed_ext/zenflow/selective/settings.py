"""What the selective rule reads of the ``zenflow`` section, as plain values."""

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
    """For how many gradients there must be room: an interval's are in flight for `lag` steps, of which the last waits
    before it writes its own."""
    return interval + max(0, lag - 1)


@dataclass(frozen=True)
class SelectiveSettings:
    """Settings of the selective rule; the fields of `ZenFlowConfig` of these names say more."""

    update_interval: int | None
    lag: int | None
    """Optimizer steps from a hand-over to taking its result; None: not overlapped, its own step waits."""
    warm_up_steps: int
    block_size: int
    topk_ratio: float
    select_every_steps: int | None
    """Optimizer steps between selections, before rounding up to whole intervals; 0: once; None: chosen by interval."""
    keeps_hot_on_host: bool
    auto_ratio: float

    @classmethod
    def of(cls, config: ZenFlowConfig) -> SelectiveSettings:
        """Those of a section.

        Raises:
            ConfigError: intervals that contradict one another.
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
                f"{settings.update_interval}: a result must be taken over before the next is handed over"
            )
        return settings

    @property
    def slots(self) -> int:
        """Of the gradient ring; an interval that is chosen later may need all of them."""
        lag = self.lag or 0
        return ring_of(self.update_interval or max(MEASURED_INTERVAL_LIMIT, lag), lag)

    @property
    def per_block(self) -> tuple[str, str, bool]:
        """The arena's array per block: update counts, which stay on the host."""
        return ("updates", "int32", False)

    def steps_between_selections(self, interval: int) -> int:
        """Optimizer steps between two selections of hot blocks: a multiple of `interval`, or 0 for never again.

        Raises:
            ConfigError: fewer than `interval` were asked for.
        """
        steps = self.select_every_steps
        if steps is None:
            steps = max(_AUTO_SELECT_STEPS, 4 * interval)
        if 0 < steps < interval:
            raise ConfigError(
                f"zero_optimization.zenflow: hot blocks are to be selected every {steps} steps, which is less than "
                f"update_interval = {interval}: raise select_interval or lower update_interval"
            )
        return math.ceil(steps / interval) * interval


def _select_every_steps(config: ZenFlowConfig) -> int | None:
    given, strategy = config.select_interval, config.select_strategy
    if strategy == "step" and given is None:
        raise ConfigError(
            'zero_optimization.zenflow.select_strategy = "step" needs select_interval, the number of optimizer steps '
            'between two selections: give it, or set select_strategy to "auto"'
        )
    if strategy != "epoch":
        return given
    if not config.steps_per_epoch:
        logger.warning(
            'zenflow.select_strategy = "epoch": the length of an epoch is known only if deepspeed.initialize is '
            "given training_data; hot blocks are selected once. Give select_strategy = step and select_interval"
        )
    return (given or 1) * (config.steps_per_epoch or 0)
