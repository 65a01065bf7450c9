"""What of the user's optimizer the worker carries out: Adam or AdamW, with each group's own hyperparameters."""

from __future__ import annotations

import torch

from deepspeed_ext.zenflow.kernel.adam_pass import AdamStep
from deepspeed_ext.zenflow.supported import DEEPSPEED_ADAMS, is_decoupled

__all__ = ["AdamHyperparameters"]


class AdamHyperparameters:
    """The user's Adam as the worker needs it: hyperparameters as they stand, and the form of its state.

    Args:
        optimizer: holds hyperparameters and, for checkpoints, state; it never moves a weight itself.

    Raises:
        ConfigError: see `is_decoupled`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._decoupled = is_decoupled(optimizer)

    def step(self, group: int, number: int, grad_scale: float) -> AdamStep:
        """The constants of update `number` (from 1) for a parameter group, as they stand now."""
        values = self._optimizer.param_groups[group]
        beta1, beta2 = values["betas"]
        return AdamStep(
            lr=float(values["lr"]),
            beta1=float(beta1),
            beta2=float(beta2),
            eps=float(values["eps"]),
            weight_decay=float(values["weight_decay"]),
            decoupled=self._decoupled,
            step=number,
            grad_scale=grad_scale,
        )

    def eps(self, group: int) -> float:
        """Adam's epsilon of a parameter group."""
        return float(self._optimizer.param_groups[group]["eps"])

    def step_value(self, updates: int) -> torch.Tensor | int:
        """The update count in the form in which the optimizer keeps it in its state."""
        if type(self._optimizer).__name__ in DEEPSPEED_ADAMS:
            return updates
        return torch.tensor(float(updates), dtype=torch.float32, device="cpu")
