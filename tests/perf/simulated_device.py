"""A stand-in for an accelerator's working time on a machine that has none. SIMULATION: it only
sleeps.

Whoever sleeps leaves the cores to others, as a trainer does that waits for its accelerator. What
the simulation cannot show: the link's transfers beside compute, the accelerator's speed at
elementwise work (here the CPU does it, on one of the optimizer's cores), its memory.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn


class _SleepInBackward(torch.autograd.Function):
    """The identity; its gradient takes as long as the device's backward pass is meant to."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, device: SimulatedDevice) -> torch.Tensor:
        ctx.device = device
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.device.backward_seconds)
        return grads[0], None


class SimulatedDevice(nn.Module):
    """`module`, whose passes take longer by a sleep of set length; a length of 0 adds nothing.

    Attributes:
        forward_seconds, backward_seconds: the lengths; may be changed between steps.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.forward_seconds = self.backward_seconds = 0.0

    def set_step_seconds(self, seconds: float) -> None:
        """A third forward and two thirds backward, as is usual."""
        self.forward_seconds, self.backward_seconds = seconds / 3, seconds * 2 / 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The module's loss."""
        if self.forward_seconds:
            time.sleep(self.forward_seconds)
        loss = self.module(x)
        return _SleepInBackward.apply(loss, self) if self.backward_seconds else loss
