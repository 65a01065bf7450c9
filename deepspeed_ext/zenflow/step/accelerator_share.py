"""Steps a share of every partition on the accelerator: exactly, in the step of its gradient.

``offload_optimizer.ratio`` is the share of the optimizer on the host. The first blocks of each
partition, up to that share, have p and the moments in accelerator memory: with Adam 12 bytes per
element there, or 8 with moments in bf16, and none on the host. They never wait for the worker, and
the update rule does not see them. The host's arrays begin before the rule's part (see
`Arena.whole`), so DeepSpeed saves, loads and shows the whole partition: `show` copies the share
there, `take` copies it back.

Source of the idea: ZeRO-Offload++ (DeepSpeed's "Twin-Flow"), which moves whole sub-groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from deepspeed_ext.errors import OutOfMemoryError
from deepspeed_ext.runtime import memory as allocation
from deepspeed_ext.runtime.ranks import RankGroup
from deepspeed_ext.zenflow.optimizers.interface import OptimizerKind
from deepspeed_ext.zenflow.plan.chunks import ROUNDED_CHUNK_NUMEL, chunk_of
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from deepspeed_ext.zenflow.worker.arena import Arena
from deepspeed_ext.zenflow.worker.kernel.codes import round_moments
from deepspeed_ext.zenflow.worker.kernel.state_layout import StepConstants

__all__ = ["AcceleratorShare"]


@dataclass(frozen=True)
class _Part:
    """The share of one partition: d elements, whole blocks.

    Attributes:
        state: p, fp32, and the moments in their own dtype; [blocks, block_size], accelerator.
        shown: the same on the host, [d], in the arena.
    """

    state: tuple[torch.Tensor, ...]
    shown: tuple[torch.Tensor, ...]


class AcceleratorShare:
    """The share of all partitions of this rank.

    Args:
        weights: each partition's weights, 1-D [n], on the accelerator; the initial values of p.
        numels: elements of each partition, from its start, that step on the accelerator.
    """

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        numels: Sequence[int],
        arena: Arena,
        block_size: int,
        kind: OptimizerKind,
    ) -> None:
        device = weights[0].device
        self.numels = tuple(numels)
        self._kind = kind
        self._arena = arena
        self._is_shown = False
        self._parts = []
        for index, (part, numel) in enumerate(zip(weights, numels, strict=True)):
            blocks = numel // block_size
            like = partial(torch.zeros, blocks, block_size, device=device)
            p = like(dtype=torch.float32).copy_(part[:numel].view(blocks, block_size))
            shown = tuple(arena.whole(each, index)[:numel] for each in kind.layout.kinds)
            moments = (like(dtype=each.dtype) for each in shown[1:])
            self._parts.append(_Part((p, *moments), shown))

    @classmethod
    def if_all_have_room(
        cls,
        plan: ZenFlowPlan,
        weights: Sequence[torch.Tensor],
        arena: Arena,
        kind: OptimizerKind,
        ranks: RankGroup,
    ) -> AcceleratorShare | None:
        """Allocate it on every rank; None on every rank if any accelerator has no memory for it. A
        collective."""
        heads, block_size = [each.head for each in plan.partitions], plan.rule.block_size
        return allocation.try_on_all_ranks(
            "zenflow.accelerator_share",
            lambda: cls(weights, heads, arena, block_size, kind),
            ranks,
        )

    @classmethod
    def on_all_ranks(
        cls,
        plan: ZenFlowPlan,
        weights: Sequence[torch.Tensor],
        arena: Arena,
        kind: OptimizerKind,
        ranks: RankGroup,
    ) -> AcceleratorShare:
        """As `if_all_have_room`.

        Raises:
            OutOfMemoryError: on every rank, if any accelerator has no memory for it.
        """
        share = cls.if_all_have_room(plan, weights, arena, kind, ranks)
        if share is None:
            raise OutOfMemoryError(
                f"offload_optimizer.ratio keeps {plan.held.share_bytes:,} bytes of the optimizer "
                f"on the accelerator of rank {ranks.rank}, and a rank has no memory for its part: "
                'raise the ratio, or set it to "auto"'
            )
        return share

    @torch.no_grad()
    def step(
        self, index: int, grad: torch.Tensor, step: StepConstants, weights: torch.Tensor
    ) -> None:
        """Take one step of a partition's share, and write its weights.

        Args:
            grad: the share's gradient, 1-D [d], any float dtype, accelerator; neither unscaled nor
                clipped.
            weights: the share's weights, 1-D [d], in the model's dtype, accelerator; written in
                place.
        """
        state = self._parts[index].state
        p = state[0]
        if p.numel():
            self._step_rows(state, grad.view_as(p), weights.view_as(p), step)

    def _step_rows(
        self,
        state: Sequence[torch.Tensor],
        grad: torch.Tensor,
        weights: torch.Tensor,
        step: StepConstants,
    ) -> None:
        """Step blocks, and round their moments as the worker does. The random numbers are those of
        the elements' places among what steps here."""
        p, *moments = state
        if self._kind.layout.moment_dtype == "float32":
            self._kind.step_rows(state, grad, weights, step)
            return
        rows = chunk_of(ROUNDED_CHUNK_NUMEL, p.shape[1]) // p.shape[1]
        for begin in range(0, len(p), rows):
            part = slice(begin, begin + rows)
            exact = [each[part].float() for each in moments]
            self._kind.step_rows((p[part], *exact), grad[part], weights[part], step)
            m, v = (each.view(-1) for each in exact)
            dtype, first = self._kind.layout.moment_dtype, begin * p.shape[1]
            round_moments(m, v, dtype, p.shape[1], step.step, first)
            for target, values in zip(moments, exact, strict=True):
                target[part].copy_(values)

    # -- outside of a step -------------------------------------------------------------------------

    @torch.no_grad()
    def show(self) -> None:
        """Copy p and the moments to the host, where they take memory until `hide`. The arena must
        not be in use."""
        for part in self._parts:
            for shown, values in zip(part.shown, part.state, strict=True):
                shown.copy_(values.view(-1))
        self._is_shown = True

    @torch.no_grad()
    def take(self) -> None:
        """Copy p and the moments back from the host, where they may have been written."""
        for part in self._parts:
            for shown, values in zip(part.shown, part.state, strict=True):
                values.copy_(shown.view_as(values))
        self._is_shown = True

    @property
    def is_shown(self) -> bool:
        """Whether it takes memory on the host."""
        return self._is_shown

    def hide(self) -> None:
        """Free the host memory of what is shown. Copies from there must be complete."""
        if self._is_shown:
            for index in range(len(self._parts)):
                for each in self._kind.layout.kinds:
                    self._arena.release_before(each, index)
            self._is_shown = False

    def tensors(self, index: int) -> list[torch.Tensor]:
        """What a partition's share keeps on the accelerator between steps."""
        return list(self._parts[index].state)
