"""Describes one partition on the trainer's side: as the update rule sees it, and as DeepSpeed does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from deepspeed_ext.runtime.ranks import RankGroup
from deepspeed_ext.zenflow.worker.kernel import AdamStep

__all__ = ["Partition", "WholeState"]


@dataclass(frozen=True)
class WholeState:
    """p, m and v of a partition of ZeRO, with n elements, as DeepSpeed saves, loads and shows them. Some of its first
    elements may step on the accelerator; the rest is the rule's `Partition`.

    Attributes:
        group: index of its parameter group.
        weights: returns its weights, 1-D [n], in the model's dtype, on the accelerator.
        master, exp_avg, exp_avg_sq: p, m, v in the arena, 1-D fp32 [n]; those of the elements on the accelerator only
            while they are shown (see `AcceleratorShare`). `master` is a leaf that requires a gradient.
    """

    group: int
    weights: Callable[[], torch.Tensor]
    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


@dataclass
class Partition:
    """The trainer's data of one partition of n elements; the same for every rule. Elements that step on the accelerator
    are not among them.

    Attributes:
        index: number of the partition.
        group: index of its parameter group.
        ranks: the ranks among which its parameters are divided, in the order of their partitions; for experts, fewer
            than all.
        weights: returns its weights, 1-D [n], in the model's dtype, on the accelerator; they are written in place.
        master, exp_avg, exp_avg_sq: p, m, v in the arena, 1-D fp32 [n]; owned by the worker while an update is in
            flight.
        publish_dtype: dtype of y, the model's or fp32.
        per_block: the rule's per-block array in the arena, 1-D [ceil(n / block_size)].
        ring: slots of the gradient ring in the arena, each 1-D [n]. y replaces the newest gradient that went into it.
        collected: constants of the gradients that have not been handed over, oldest first.
    """

    index: int
    group: int
    ranks: RankGroup
    weights: Callable[[], torch.Tensor]
    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    publish_dtype: torch.dtype
    per_block: torch.Tensor
    ring: list[torch.Tensor]
    collected: list[AdamStep] = field(default_factory=list)

    @property
    def state(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """p, m, v."""
        return self.master, self.exp_avg, self.exp_avg_sq

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.weights().device
