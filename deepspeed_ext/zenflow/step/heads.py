"""Steps the head of every partition on the accelerator: exactly, in the step of its gradient.

``offload_optimizer.ratio`` is the share of the optimizer on the host. The first blocks of each
partition, up to that share, have p and the moments in accelerator memory: with Adam 12 bytes per
element there, 8 with moments in bf16, or 6.1 with those of 8 bits, and none on the host. They never
wait for the worker, and the update rule does not see them. The host's arrays begin before the
rule's part (see `Arena.whole`), so DeepSpeed saves, loads and shows the whole partition: `show`
copies the share there, `take` copies it back.

Source of the idea: ZeRO-Offload++ (DeepSpeed's "Twin-Flow"), which moves whole sub-groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from deepspeed_ext.runtime import memory as allocation
from deepspeed_ext.runtime.ranks import RankGroup
from deepspeed_ext.zenflow.optimizers.interface import OptimizerKind
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from deepspeed_ext.zenflow.worker.arena import Arena


class Heads:
    """The heads of all partitions of this rank.

    Args:
        weights: each partition's weights, 1-D [n], on the accelerator; the initial values of p.

    Attributes:
        numels: elements of each partition, from its start, that step on the accelerator.
    """

    def __init__(
        self, plan: ZenFlowPlan, weights: Sequence[torch.Tensor], arena: Arena, kind: OptimizerKind
    ) -> None:
        device, block_size, layout = weights[0].device, plan.rule.block_size, kind.layout
        self.numels = tuple(each.head for each in plan.partitions)
        self._kind = kind
        self._arena = arena
        self.is_shown = False
        # by partition: p, fp32, and the moments in their own dtypes, [blocks, block_size], and
        # scales of codes, [blocks], on the accelerator; and where each is shown, 1-D, in the arena
        self._parts: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        for index, (part, numel) in enumerate(zip(weights, self.numels, strict=True)):
            blocks = numel // block_size
            shapes: dict[str, tuple[int, ...]] = dict.fromkeys(layout.kinds, (blocks, block_size))
            shapes |= dict.fromkeys(layout.scales, (blocks,))
            shown = [arena.whole(each, index)[: prod(shape)] for each, shape in shapes.items()]
            state = [
                torch.zeros(shape, dtype=each.dtype, device=device)
                for each, shape in zip(shown, shapes.values(), strict=True)
            ]
            state[0].copy_(part[:numel].view_as(state[0]))
            self._parts.append(list(zip(state, shown, strict=True)))

    @classmethod
    def if_all_have_room(
        cls,
        plan: ZenFlowPlan,
        weights: Sequence[torch.Tensor],
        arena: Arena,
        kind: OptimizerKind,
        ranks: RankGroup,
    ) -> Heads | None:
        """Allocate it on every rank; None on every rank if any accelerator has no memory for it. A
        collective."""
        return allocation.try_on_all_ranks(
            "zenflow.heads", lambda: cls(plan, weights, arena, kind), ranks
        )

    @torch.no_grad()
    def step(self, index: int, grad: torch.Tensor, step: Any, weights: torch.Tensor) -> None:
        """Take one step of a partition's share, and write its weights.

        Args:
            step: the update's constants.
            grad, weights: the share's, 1-D [d], accelerator; the gradient in any float dtype,
                neither unscaled nor clipped; the weights in the model's dtype, written in place.
        """
        state = self.tensors(index)
        p = state[0]
        if p.numel():
            self._kind.step_rows(state, grad.view_as(p), weights.view_as(p), step)

    # -- outside of a step -------------------------------------------------------------------------

    @torch.no_grad()
    def show(self) -> None:
        """Copy p and the moments, or their codes, to the host, where they take memory until `hide`.
        The arena must not be in use."""
        for part in self._parts:
            for values, shown in part:
                shown.copy_(values.view(-1))
        self.is_shown = True

    @torch.no_grad()
    def take(self) -> None:
        """Copy p and the moments back from the host, where they may have been written."""
        for part in self._parts:
            for values, shown in part:
                values.copy_(shown.view_as(values))
        self.is_shown = True

    def hide(self) -> None:
        """Free the host memory of what is shown. Copies from there must be complete."""
        if self.is_shown:
            for index in range(len(self._parts)):
                for each in self._kind.layout.kept:
                    self._arena.release_before(each, index)
            self.is_shown = False

    def tensors(self, index: int) -> list[torch.Tensor]:
        """What a partition's share keeps on the accelerator."""
        return [values for values, _ in self._parts[index]]
