"""Reads the selective rule's settings from the ``zenflow`` section."""

from __future__ import annotations

import math
from dataclasses import dataclass

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.errors import ConfigError
from deepspeed_ext.zenflow.plan.arrays import PerBlock
from deepspeed_ext.zenflow.plan.places import Arrival, Places
from deepspeed_ext.zenflow.plan.rule import RuleSettings

__all__ = [
    "SelectiveSettings",
    "hot_blocks",
    "most_hot_blocks",
    "ring_of",
    "unknown_epoch",
]

_AUTO_SELECT_STEPS = 16
_LONGEST_CHOSEN = 8
"""Longest interval that the rule chooses by itself."""
_BALANCE = 2
_STATE_BYTES = 3 * 4
"""Bytes per element of a hot block: p, m and v in fp32."""
_COUNT_BYTES = 4


def ring_of(interval: int, lag: int, arrival: Arrival) -> int:
    """Number of ring slots needed. An interval's gradients stay in flight for `lag` steps. The last
    of these steps waits before it writes its own gradient, unless that arrives in backward, before
    the step. At interval 1 that gradient reuses the slot of y, which its step has read, unless it
    arrives before that (see Note: [the slot of y])."""
    least = 2 if lag and arrival is Arrival.BEFORE_Y else 1
    return max(interval + max(0, lag - (arrival is not Arrival.IN_BACKWARD)), least)


def hot_blocks(blocks: int, ratio: float) -> int:
    """Number of hot blocks among the `blocks` of all ranks."""
    return math.ceil(ratio * blocks)


def most_hot_blocks(blocks: int, ratio: float) -> int:
    """Maximum number of hot blocks of a rank with `blocks` blocks: twice its equal share."""
    return min(blocks, _BALANCE * hot_blocks(blocks, ratio))


@dataclass(frozen=True)
class SelectiveSettings(RuleSettings):
    """Settings of the selective rule, which runs Adam only."""

    lag: int | None
    """Optimizer steps from a hand-over to applying its result; None: not overlapped, the step waits
    for its own result."""
    warm_up_steps: int
    topk_ratio: float
    select_every_steps: int | None
    """Optimizer steps between selections, before rounding up to whole intervals; 0: select once;
    None: derived from the interval."""
    keeps_hot_on_host: bool
    auto_ratio: float

    @classmethod
    def of(cls, config: ZenFlowConfig, steps_per_epoch: int | None = None) -> SelectiveSettings:
        """Read the settings from a section.

        Args:
            steps_per_epoch: optimizer steps per epoch; None: unknown.

        Raises:
            ConfigError: intervals contradict each other.
        """
        settings = cls(
            update_interval=config.interval,
            lag=config.overlap_lag if config.overlapped else None,
            warm_up_steps=max(1, config.full_warm_up_rounds),
            block_size=config.select_block_size,
            topk_ratio=config.topk_ratio,
            select_every_steps=_select_every_steps(config, steps_per_epoch),
            keeps_hot_on_host=config.offload,
            auto_ratio=config.auto_ratio,
        )
        settings.steps_between_selections(settings.update_interval or 1)
        if settings.update_interval is None and 0 < (settings.select_every_steps or 0) < (
            settings.lag or 0
        ):
            raise ConfigError(
                f"zero_optimization.zenflow selects hot blocks every {settings.select_every_steps} "
                f"steps, which is less than overlap_lag = {settings.lag}: "
                "raise select_interval or lower overlap_lag"
            )
        if settings.lag and settings.update_interval and settings.lag > settings.update_interval:
            raise ConfigError(
                f"zero_optimization.zenflow.overlap_lag = {settings.lag} is more than "
                f"update_interval = {settings.update_interval}, but a result must be applied "
                "before the next hand-over: lower overlap_lag"
            )
        return settings

    @property
    def overlapped(self) -> bool:
        """Whether steps after the warm-up are overlapped."""
        return self.lag is not None

    @property
    def shortest_interval(self) -> int:
        return self.lag or 1

    @property
    def longest_interval(self) -> int:
        """If the first selection chooses it: at least the lag, and at most the number of steps
        until the next one."""
        longest = min(_LONGEST_CHOSEN, self.select_every_steps or _LONGEST_CHOSEN)
        return self.update_interval or max(longest, self.lag or 0)

    def ring_at(self, interval: int | None, arrival: Arrival) -> int:
        lag = self.lag or 0
        return (
            ring_of(1, min(lag, 1), arrival)
            if interval is None
            else ring_of(interval, lag, arrival)
        )

    @property
    def steps_each_gradient(self) -> bool:
        """False: the host averages an interval's gradients."""
        return False

    @property
    def estimates(self) -> bool:
        return False

    @property
    def steps_beside_worker(self) -> bool:
        """True: hot blocks."""
        return True

    def per_block(self, places: Places) -> PerBlock:
        """Update counts, which stay on the host."""
        return PerBlock("updates", "int32", exchanged=False)

    def hot_blocks(self, numel: int) -> int:
        """Hot blocks of a partition of `numel` elements, if every rank has an equal share of
        them."""
        return hot_blocks(-(-numel // self.block_size), self.topk_ratio)

    def hot_state_bytes(self, blocks: int) -> int:
        """Bytes of p, m, v and update counts of `blocks` hot blocks."""
        return blocks * (self.block_size * _STATE_BYTES + _COUNT_BYTES)

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
                f"zero_optimization.zenflow selects hot blocks every {steps} steps, which is less "
                f"than update_interval = {interval}: raise select_interval or lower update_interval"
            )
        return math.ceil(steps / interval) * interval


def _select_every_steps(config: ZenFlowConfig, steps_per_epoch: int | None) -> int | None:
    given, strategy = config.select_interval, config.select_strategy
    if strategy == "step" and given is None:
        raise ConfigError(
            'zero_optimization.zenflow.select_strategy = "step" needs select_interval, the number '
            'of optimizer steps between two selections: set it, or set select_strategy to "auto"'
        )
    if strategy != "epoch":
        return given
    return (given or 1) * (steps_per_epoch or 0)


def unknown_epoch(config: ZenFlowConfig, steps_per_epoch: int | None) -> str | None:
    """A warning if hot blocks are selected by epochs of unknown length; else None."""
    if config.rule != "selective" or config.select_strategy != "epoch" or steps_per_epoch:
        return None
    return (
        'zenflow.select_strategy = "epoch": the length of an epoch is known only if '
        "deepspeed.initialize gets training_data, so hot blocks are selected only once. Set "
        'select_strategy to "step", and select_interval'
    )
