"""Reads the selective rule's settings from the ``zenflow`` section."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.errors import ConfigError
from deepspeed_ext.zenflow.plan.rule import FLOAT_BYTES, RuleBytes, RuleSettings, head_step_bytes
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE
from deepspeed_ext.zenflow.worker.kernel.passes import StateLayout

__all__ = ["SelectiveSettings"]

_INTERVAL = 4
_LEAST_STEPS, _LEAST_INTERVALS = 16, 4
"""Between two selections, unless the config says otherwise."""
_STATE_BYTES = 3 * FLOAT_BYTES
"""Bytes per element of a hot block: p, m and v in fp32."""
_NUMBER_BYTES = 8


@dataclass(frozen=True)
class SelectiveSettings(RuleSettings):
    """Settings of the selective rule, which runs Adam only. It collects the gradients of an
    interval by itself and hands over their mean; the worker sees one gradient."""

    steps_beside_worker = True  # hot blocks
    limits: ClassVar[str] = (
        "hot blocks step on the accelerator in place of a share, with fp32 moments of Adam, and "
        "each data-parallel group chooses its own; the predictive rule has none of these limits"
    )

    interval: int
    """Optimizer steps whose mean gradient makes one step of the cold blocks."""
    topk_ratio: float
    select_every_steps: int
    """Optimizer steps between two selections, a multiple of `interval`; 0: select only once."""

    @classmethod
    def of(
        cls,
        config: ZenFlowConfig,
        *,
        layout: StateLayout = ADAM_STATE,
        steps_per_epoch: int | None = None,
    ) -> SelectiveSettings:
        """Read the settings from a section.

        Raises:
            ConfigError: intervals contradict each other.
        """
        given, by_epoch = config.update_interval, config.select_strategy == "epoch"
        steps = _select_steps(config, steps_per_epoch)
        interval = given if isinstance(given, int) else min(_INTERVAL, steps or _INTERVAL)
        return cls(
            overlapped=config.overlapped,
            warm_up_steps=max(1, config.full_warm_up_rounds),
            block_size=config.block_size,
            layout=layout,
            interval=interval,
            topk_ratio=config.topk_ratio,
            select_every_steps=_in_intervals(steps, interval),
            warning=_UNKNOWN_EPOCH if by_epoch and not steps_per_epoch else None,
        )

    def nbytes(self, numel: int, item: int = 0, *, in_place: bool = False) -> RuleBytes:
        """Kept: p, m, v and the numbers of the hot blocks, and the mean of the interval's
        gradients. A step takes the gradient and weights of the hot blocks."""
        blocks = math.ceil(self.topk_ratio * (numel // self.block_size))
        hot, numbers = blocks * self.block_size, blocks * _NUMBER_BYTES
        mean = numel * item if self.interval > 1 else 0
        kept = {"hot blocks": numbers + hot * _STATE_BYTES, "mean gradient": mean}
        step = head_step_bytes(hot, self.block_size) + 2 * hot * item
        return RuleBytes(kept, (numbers, mean), step)


_UNKNOWN_EPOCH = (
    'zenflow.select_strategy = "epoch": the length of an epoch is known only if '
    "deepspeed.initialize gets training_data, so hot blocks are selected only once. Set "
    'select_strategy to "step", and select_interval'
)


def _select_steps(config: ZenFlowConfig, steps_per_epoch: int | None) -> int | None:
    """Optimizer steps between two selections as the config gives them; 0: one selection; None: not
    given."""
    given, strategy = config.select_interval, config.select_strategy
    if strategy == "step" and given is None:
        raise ConfigError(
            'zero_optimization.zenflow.select_strategy = "step" needs select_interval, the number '
            'of optimizer steps between two selections: set it, or set select_strategy to "auto"'
        )
    return given if strategy != "epoch" else (given or 1) * (steps_per_epoch or 0)


def _in_intervals(steps: int | None, interval: int) -> int:
    """`steps` rounded up to whole intervals."""
    if steps is None:
        steps = max(_LEAST_STEPS, _LEAST_INTERVALS * interval)
    if 0 < steps < interval:
        raise ConfigError(
            f"zero_optimization.zenflow selects hot blocks every {steps} steps, which is less "
            f"than update_interval = {interval}: raise select_interval or lower update_interval"
        )
    return math.ceil(steps / interval) * interval
