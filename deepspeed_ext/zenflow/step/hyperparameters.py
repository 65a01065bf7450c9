"""Reads the hyperparameters that the worker needs from the user's Adam or AdamW."""

from __future__ import annotations

import torch

from deepspeed_ext.zenflow.step.supported import DEEPSPEED_ADAMS, require_adam
from deepspeed_ext.zenflow.worker.kernel.adam_pass import AdamStep

__all__ = ["AdamHyperparameters"]


class AdamHyperparameters:
    """Current hyperparameters of the user's Adam, and the format of its state.

    Args:
        optimizer: holds hyperparameters and, for checkpoints, the state; it never updates a weight itself.

    Raises:
        ConfigError: see `require_adam`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._decoupled = require_adam(optimizer)

    def step(self, group: int, number: int, grad_scale: float) -> AdamStep:
        """The constants of one update, from the current hyperparameters.

        Args:
            group: index of the parameter group.
            number: number of the update, from 1.
            grad_scale: multiplies the gradient; its sign changes where a group is maximized.
        """
        values = self._optimizer.param_groups[group]
        beta1, beta2 = values["betas"]
        sign = -1.0 if values.get("maximize") else 1.0
        return AdamStep(
            lr=float(values["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(values["eps"]),
            weight_decay=float(values["weight_decay"]),
            decoupled=bool(values.get("decoupled_weight_decay", self._decoupled)),
            step=number,
            grad_scale=sign * grad_scale,
            bias_correction=bool(values.get("bias_correction", True)),
        )

    def step_value(self, updates: int) -> torch.Tensor | int:
        """The update count in the form in which the optimizer stores it: an int, or a 0-D fp32 CPU tensor."""
        if type(self._optimizer).__name__ in DEEPSPEED_ADAMS:
            return updates
        return torch.tensor(float(updates), dtype=torch.float32, device="cpu")
