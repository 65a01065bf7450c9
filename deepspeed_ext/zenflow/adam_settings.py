"""What of the user's optimizer the worker carries out: Adam or AdamW, with each group's own hyperparameters."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed_ext._errors import ConfigError
from deepspeed_ext.zenflow.kernel.adam_pass import AdamStep

__all__ = ["adam_step", "is_decoupled", "step_value"]

_DEEPSPEED_ADAMS = ("DeepSpeedCPUAdam", "FusedAdam")


def is_decoupled(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer` is AdamW (True) or Adam with L2 (False).

    Raises:
        ConfigError: it is neither, or uses a variant that the worker does not know.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.AdamW):
        decoupled = True
    elif isinstance(optimizer, torch.optim.Adam):
        decoupled = bool(optimizer.defaults.get("decoupled_weight_decay", False))
    elif name in _DEEPSPEED_ADAMS:
        decoupled = bool(getattr(optimizer, "adam_w_mode", True))
    else:
        raise ConfigError(
            f"zero_optimization.zenflow works with Adam and AdamW and the optimizer is {name}: "
            "use torch.optim.AdamW or Adam (or DeepSpeed's), or remove the zenflow section"
        )
    for index, group in enumerate(optimizer.param_groups):
        for variant, expected in (("amsgrad", False), ("maximize", False), ("bias_correction", True)):
            if bool(group.get(variant, expected)) is not expected:
                raise ConfigError(
                    f"zero_optimization.zenflow does not support {variant}={group[variant]} "
                    f"(parameter group {index} of {name}): set it to {expected}"
                )
    return decoupled


def adam_step(group: dict[str, Any], decoupled: bool, step: int, grad_scale: float) -> AdamStep:
    """The constants of update number `step` (from 1) for a parameter group, as they stand now."""
    beta1, beta2 = group["betas"]
    return AdamStep(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        decoupled=decoupled,
        step=step,
        grad_scale=grad_scale,
    )


def step_value(optimizer: torch.optim.Optimizer, step: int) -> torch.Tensor | int:
    """The update count in the form in which `optimizer` keeps it in its state."""
    if type(optimizer).__name__ in _DEEPSPEED_ADAMS:
        return step
    return torch.tensor(float(step), dtype=torch.float32, device="cpu")
