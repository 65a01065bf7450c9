"""Describes one partition on the trainer's side, as the update rule and as DeepSpeed see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from deepspeed_ext.zenflow.plan.places import Place, Places
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from deepspeed_ext.zenflow.worker.arena import Arena


@dataclass(frozen=True)
class WholeState:
    """p and the moments of a ZeRO partition of n elements, as DeepSpeed saves, loads and shows
    them. Its first elements may step on the accelerator; the rest is the rule's `Partition`.

    Attributes:
        group: index of its parameter group.
        weights: returns its weights, 1-D [n], in the model's dtype, on the accelerator.
        master: p in the arena, 1-D fp32 [n]; a leaf that requires a gradient. Elements that step on
            the accelerator are in it only while they are shown (see `Heads`).
        moments: likewise m and v, or m alone, by their names in the optimizer's state. For codes,
            the arrays that show them (see `StateStore`).
    """

    group: int
    weights: Callable[[], torch.Tensor]
    master: torch.Tensor
    moments: Mapping[str, torch.Tensor]

    @property
    def arrays(self) -> tuple[torch.Tensor, ...]:
        """p and the moments, without gradients."""
        return (self.master.detach(), *self.moments.values())


@dataclass
class Partition:
    """The trainer's data of one partition of n elements, for any rule. Elements that step on the
    accelerator are not among them.

    Attributes:
        index: number of the partition.
        group: index of its parameter group.
        weights: returns its weights, 1-D [n], in the model's dtype, on the accelerator; they are
            written in place.
        master, moments: p, and m and v or m alone, in the arena, 1-D [n]; owned by the worker while
            an update is in flight.
        scales: scales of m and v, if they are codes, uint8 [ceil(n / block_size)].
        grad_dtype: dtype in which gradients are handed over.
        ring: slots of the gradient ring in the arena, each 1-D [n]. y replaces the newest gradient
            that went into it. Empty if gradients and y pass through the host in chunks.
        places: where its arrays are.
    """

    index: int
    group: int
    weights: Callable[[], torch.Tensor]
    master: torch.Tensor
    moments: tuple[torch.Tensor, ...]
    grad_dtype: torch.dtype
    ring: list[torch.Tensor]
    places: Places
    scales: tuple[torch.Tensor, ...] = ()

    @classmethod
    def of(cls, plan: ZenFlowPlan, index: int, whole: WholeState, arena: Arena) -> Partition:
        """The partition without its head, which steps on the accelerator."""
        layout, head = plan.rule.layout, plan.partitions[index].head
        return cls(
            index,
            whole.group,
            (lambda: whole.weights()[head:]) if head else whole.weights,
            master=arena.tensor("p", index),
            moments=tuple(arena.tensor(kind, index) for kind, _ in layout.moments),
            scales=tuple(arena.tensor(kind, index) for kind in layout.scales),
            grad_dtype=getattr(torch, plan.gradient_dtype),
            ring=[arena.tensor(*key) for key in arena.keys("g", index)],
            places=plan.places,
        )

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        """p and the moments."""
        return self.master, *self.moments

    @property
    def device(self) -> torch.device:
        """Where the weights are computed: device of the gradients, and of what the rule keeps."""
        return torch.device("cpu") if self.places.gradient is Place.HOST else self.weights().device
