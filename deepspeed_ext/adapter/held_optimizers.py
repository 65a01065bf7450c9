"""Stands in for DeepSpeed's CPU optimizers, whose work ZenFlow does: builds optimizers that only hold hyperparameters
and, for checkpoints, the state. DeepSpeed's own would compile an operator first."""

from __future__ import annotations

from typing import Any

import torch

from deepspeed_ext.adapter.upstream import Swap, adam_module, lion_module

__all__ = ["held_optimizers"]


def held_optimizers() -> list[Swap]:
    """Return swaps for the names by which ``DeepSpeedEngine._configure_basic_optimizer`` finds CPU optimizers."""
    return [Swap(adam_module, "DeepSpeedCPUAdam", held_adam), Swap(lion_module, "DeepSpeedCPULion", held_lion)]


def held_adam(
    parameters: Any,
    *,
    weight_decay: float = 0.0,
    bias_correction: bool = True,
    adamw_mode: bool = True,
    fp32_optimizer_states: bool = True,
    **others: Any,
) -> torch.optim.Optimizer:
    """Torch's Adam or AdamW with the arguments and defaults of ``DeepSpeedCPUAdam``.

    Args:
        parameters, weight_decay, adamw_mode, others: as there.
        bias_correction: as there; a parameter group says if it has none.
        fp32_optimizer_states: ignored: it gives the state the dtype of the masters, which are fp32 here.
    """
    kind = torch.optim.AdamW if adamw_mode else torch.optim.Adam
    optimizer = kind(parameters, weight_decay=weight_decay, **others)
    if not bias_correction:
        for fields in (optimizer.defaults, *optimizer.param_groups):
            fields.setdefault("bias_correction", False)
    return optimizer


_CPULion = lion_module.DeepSpeedCPULion


def held_lion(
    model_params: Any,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    fp32_optimizer_states: bool = True,
) -> torch.optim.Optimizer:
    """A ``DeepSpeedCPULion`` without its operator, which nobody calls: no parameter of it has a gradient.

    DeepSpeed asks for the exact class, and torch has no Lion.

    Args:
        model_params, lr, betas, weight_decay: as there.
        fp32_optimizer_states: ignored, as in `held_adam`.
    """
    optimizer = _CPULion.__new__(_CPULion)
    torch.optim.Optimizer.__init__(optimizer, model_params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
    return optimizer
