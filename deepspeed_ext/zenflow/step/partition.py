"""Describes one partition on the trainer's side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from deepspeed_ext.runtime.ranks import RankGroup
from deepspeed_ext.zenflow.worker.kernel import AdamStep

__all__ = ["Partition"]


@dataclass
class Partition:
    """The trainer's data of one partition of n elements; the same for every rule.

    Attributes:
        index: number of the partition.
        group: index of its parameter group.
        ranks: the ranks among which its parameters are divided, in the order of their partitions; for experts, fewer
            than all.
        weights: returns its weights, 1-D [n], in the model's dtype, on the accelerator; they are written in place.
        master, exp_avg, exp_avg_sq: p, m, v in the arena, 1-D fp32 [n]; owned by the worker while an update is in
            flight.
        published: y in the arena, 1-D [n], in the model's dtype or fp32.
        per_block: the rule's per-block array in the arena, 1-D [ceil(n / block_size)].
        ring: slots of the gradient ring in the arena, each 1-D [n].
        collected: constants of the gradients that have not been handed over, oldest first.
    """

    index: int
    group: int
    ranks: RankGroup
    weights: Callable[[], torch.Tensor]
    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    published: torch.Tensor
    per_block: torch.Tensor
    ring: list[torch.Tensor]
    collected: list[AdamStep] = field(default_factory=list)

    @property
    def state(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """p, m, v, detached from autograd."""
        return self.master.detach(), self.exp_avg, self.exp_avg_sq

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.weights().device
