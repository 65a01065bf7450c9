"""Finds the settings of a config's update rule."""

from __future__ import annotations

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.zenflow.plan.rule import PredictiveSettings
from deepspeed_ext.zenflow.plan.selective import SelectiveSettings
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE
from deepspeed_ext.zenflow.worker.kernel.passes import StateLayout

__all__ = ["limits_of", "settings_of"]


def settings_of(
    config: ZenFlowConfig, layout: StateLayout = ADAM_STATE, steps_per_epoch: int | None = None
) -> PredictiveSettings | SelectiveSettings:
    """The settings of the config's rule.

    Args:
        layout: the optimizer's state.
        steps_per_epoch: optimizer steps per epoch; None: unknown.

    Raises:
        ConfigError: the section contradicts itself.
    """
    if config.rule == "selective":
        return SelectiveSettings.of(config, layout=layout, steps_per_epoch=steps_per_epoch)
    return PredictiveSettings.of(config, layout=layout)


def limits_of(config: ZenFlowConfig) -> str:
    """See `RuleSettings.limits`."""
    return SelectiveSettings.limits if config.rule == "selective" else PredictiveSettings.limits
