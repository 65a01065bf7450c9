"""Follows the loss scale of ``torch_autocast`` with float16, which DeepSpeed keeps in a torch ``GradScaler``."""

from __future__ import annotations

import math
from typing import Any

import torch

from deepspeed_ext.runtime.backend import get_accelerator

__all__ = ["AutocastScale"]


class AutocastScale:
    """Uses DeepSpeed's ``GradScaler`` as its own step of an optimizer would, on a gradient of one element.

    DeepSpeed unscales and checks each partition's gradient by itself, so the scale may grow between two partitions.

    Args:
        scaler: the ``GradScaler`` of DeepSpeed's optimizer.
    """

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler
        device = get_accelerator().current_device_name()
        self._one = torch.zeros(1, dtype=torch.float32, device=device, requires_grad=True)
        self._steps = torch.optim.SGD([self._one], lr=0.0)

    def factor(self) -> float:
        """Return the multiplier that unscales the gradient of the next partition, and note a step without overflow."""
        return self._stepped(1.0)

    def overflowed(self) -> None:
        """Lower the scale after an overflow. DeepSpeed 0.19.8 never does: it skips the step before the ``GradScaler``
        sees the gradient, so every later step would overflow too."""
        self._stepped(math.inf)

    def _stepped(self, gradient: float) -> float:
        grad = torch.full_like(self._one, gradient)
        self._one.grad = grad
        self._scaler.unscale_(self._steps)
        self._scaler.step(self._steps)
        self._scaler.update()
        return float(grad)

    def state_dict(self) -> dict[str, Any]:
        """The scale and the steps since it last changed; DeepSpeed's checkpoints leave them out."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self._scaler.load_state_dict(state)
