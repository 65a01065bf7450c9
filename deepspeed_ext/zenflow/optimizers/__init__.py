"""The optimizers that ZenFlow can run: their state, step and estimate."""

from __future__ import annotations

from collections.abc import Callable

import torch

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.errors import ConfigError
from deepspeed_ext.zenflow.optimizers.adam import AdamKind, held_adam
from deepspeed_ext.zenflow.optimizers.interface import OptimizerKind
from deepspeed_ext.zenflow.optimizers.lion import LionKind, held_lion
from deepspeed_ext.zenflow.plan.rule import limits_of

_KINDS: tuple[type[OptimizerKind], ...] = (AdamKind, LionKind)

LAYOUTS = {kind.layout.name: kind.layout for kind in _KINDS}
"""The state of each optimizer, by its name in checkpoints."""

STAND_INS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam.DeepSpeedCPUAdam": held_adam,
    "lion.DeepSpeedCPULion": held_lion,
}
"""By the name of DeepSpeed's CPU optimizer in ``deepspeed.ops``: makes, from its class and
arguments, one that holds hyperparameters and state but needs no compiled operator."""


def kind_of(optimizer: torch.optim.Optimizer, config: ZenFlowConfig) -> OptimizerKind:
    """The user's optimizer, as ZenFlow runs it.

    Raises:
        ConfigError: ZenFlow does not run it at all, or not with this rule or dtype.
    """
    name = type(optimizer).__name__
    kind = next((each for each in _KINDS if each.serves(optimizer)), None)
    if kind is None:
        raise ConfigError(
            "zero_optimization.zenflow works with Adam, AdamW and Lion, but the optimizer is "
            f"{name}: use Adam or AdamW from torch.optim or DeepSpeed, or DeepSpeed's Lion, or "
            "remove the zenflow section"
        )
    if (limits := limits_of(config)) and kind is not AdamKind:
        raise ConfigError(
            f'zero_optimization.zenflow.update_rule = "{config.rule}" with {name} ({limits}): set '
            'it to "predictive" and remove topk_ratio and the select_* fields, or use Adam or AdamW'
        )
    if not config.keeps_exact_moments and kind is not AdamKind:
        raise ConfigError(
            f"zero_optimization.zenflow.state_dtype with {name}: only Adam's and AdamW's moments "
            "can be rounded. Remove the field"
        )
    return kind(optimizer, config)
