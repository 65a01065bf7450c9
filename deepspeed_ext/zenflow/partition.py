"""What the trainer holds of one partition, and what its gradient is multiplied with."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from deepspeed_ext.zenflow.kernel import AdamStep
from deepspeed_ext.zenflow.worker.transfers import Streamed

__all__ = ["GradFactor", "PartitionState"]


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
class PartitionState:
    """What the trainer holds of one partition of n elements.

    Attributes:
        group: index of its parameter group.
        master, exp_avg, exp_avg_sq: p, m, v in the arena, 1-D fp32; the worker's while a submission is in flight.
        published: y in the arena.
        ring: room for gradients in the arena, as the schedule says.
        collected: constants of the gradients that have not been handed over.
        streamed: what of the coming step's gradient is on its way.
    """

    group: int
    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    published: torch.Tensor
    ring: list[torch.Tensor]
    collected: list[AdamStep] = field(default_factory=list, kw_only=True)
    streamed: Streamed = field(default_factory=Streamed, kw_only=True)
