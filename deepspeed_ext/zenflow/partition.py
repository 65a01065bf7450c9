"""One partition as the trainer sees it, and the factor of its gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from deepspeed_ext.zenflow.kernel import AdamStep
from deepspeed_ext.zenflow.worker.transfers import Streamed

__all__ = ["GradFactor", "Partition"]


@dataclass(frozen=True)
class GradFactor:
    """What a gradient is multiplied with: ``c = unscale / clip``, and apart, because the clip may be the last one."""

    unscale: float
    clip: float

    @property
    def value(self) -> float:
        """c."""
        return self.unscale * self.clip


@dataclass
class Partition:
    """What the trainer holds of one partition of n elements under any rule.

    Attributes:
        index: its number.
        group: index of its parameter group.
        weights: returns its 16-bit weights, 1-D [n], on the accelerator; they are written in place.
        master, exp_avg, exp_avg_sq: p, m, v in the arena, 1-D fp32 [n]; the worker's while an update is in flight.
        published: y in the arena, 1-D [n], 16-bit or fp32.
        per_block: the rule's array with an entry for every block, in the arena, 1-D [ceil(n / block_size)].
        ring: slots for gradients in the arena, each 1-D [n].
        collected: constants of the gradients that have not been handed over, oldest first.
        streamed: what of the coming step's gradient is on its way.
    """

    index: int
    group: int
    weights: Callable[[], torch.Tensor]
    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    published: torch.Tensor
    per_block: torch.Tensor
    ring: list[torch.Tensor]
    collected: list[AdamStep] = field(default_factory=list)
    streamed: Streamed = field(default_factory=Streamed)

    @property
    def state(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """p, m, v without gradients."""
        return self.master.detach(), self.exp_avg, self.exp_avg_sq

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self.weights().device
