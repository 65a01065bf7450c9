"""Steps a share of every partition on the accelerator: exactly, in the same step as the gradient.

``offload_optimizer.ratio`` is the share of the optimizer on the host. The first blocks of each partition, up to that
share, have p and the moments in accelerator memory: with Adam 12 bytes per element there, and none on the host. They
never wait for the worker, and the update rule does not see them. The host's arrays begin in front of the rule's part
(see `Arena.whole`), so what DeepSpeed saves, loads and shows is the whole partition: `show` copies the share there,
`take` copies it back.

Source of the idea: ZeRO-Offload++ (DeepSpeed's "Twin-Flow"), which moves whole sub-groups.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from deepspeed_ext.errors import OutOfMemoryError
from deepspeed_ext.runtime import memory as allocation
from deepspeed_ext.runtime.backend import get_accelerator
from deepspeed_ext.runtime.log import logger
from deepspeed_ext.runtime.ranks import RankGroup, together
from deepspeed_ext.zenflow.optimizers.interface import HostedOptimizer
from deepspeed_ext.zenflow.worker.arena import Arena
from deepspeed_ext.zenflow.worker.kernel.state_layout import StateLayout, StepConstants
from deepspeed_ext.zenflow.worker.sizes import (
    RuleSettings,
    accelerator_numel,
    accelerator_share_bytes,
    arena_specs,
    landing_bytes,
)

__all__ = ["AcceleratorShare", "ShareFacts", "bytes_beside_share", "host_share_that_fits", "units_that_fit"]

_SMALLEST_STEP = 1 / 1024
"""Ranks agree on the share in units of this."""


@dataclass(frozen=True)
class _Part:
    """The share of one partition: d elements, whole blocks.

    Attributes:
        state: p and the moments; fp32 [blocks, block_size], accelerator.
        shown: the same on the host, fp32 [d], in the arena.
    """

    state: tuple[torch.Tensor, ...]
    shown: tuple[torch.Tensor, ...]


class AcceleratorShare:
    """The share of all partitions of this rank.

    Args:
        weights: of each partition, 1-D [n], on the accelerator; the initial values of p.
        numels: elements of each partition, from its start, that step on the accelerator.
    """

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        numels: Sequence[int],
        arena: Arena,
        block_size: int,
        kind: HostedOptimizer,
    ) -> None:
        device = weights[0].device
        self.numels = tuple(numels)
        self._kind = kind
        self._arena = arena
        self._is_shown = False
        self._parts = []
        for index, (part, numel) in enumerate(zip(weights, numels, strict=True)):
            blocks = numel // block_size
            like = partial(torch.zeros, blocks, block_size, dtype=torch.float32, device=device)
            p = like().copy_(part[:numel].view(blocks, block_size))
            shown = tuple(arena.whole(each, index)[:numel] for each in kind.layout.kinds)
            self._parts.append(_Part((p, *(like() for _ in kind.layout.moments)), shown))
        counted = numels if kind.layout.counts_updates else ()
        most = max((numel // block_size for numel in counted), default=0)
        self._updates = torch.zeros(most, dtype=torch.int32, device=device)

    @classmethod
    def on_all_ranks(
        cls,
        weights: Sequence[torch.Tensor],
        numels: Sequence[int],
        arena: Arena,
        block_size: int,
        kind: HostedOptimizer,
        ranks: RankGroup,
    ) -> AcceleratorShare:
        """Allocate it on every rank. A collective.

        Raises:
            OutOfMemoryError: on every rank, if the accelerator of any has no memory for it.
        """
        share = allocation.try_on_all_ranks(
            "zenflow.accelerator_share", lambda: cls(weights, numels, arena, block_size, kind), ranks
        )
        if share is None:
            needed = sum(accelerator_share_bytes(numel, block_size, kind.layout) for numel in numels)
            raise OutOfMemoryError(
                f"offload_optimizer.ratio keeps {needed:,} bytes of the optimizer on the accelerator of rank "
                f'{ranks.rank}, and a rank has no memory for that: raise the ratio, or set it to "auto"'
            )
        return share

    @torch.no_grad()
    def step(self, index: int, grad: torch.Tensor, step: StepConstants, weights: torch.Tensor) -> None:
        """Take one step of a partition's share, and write its weights.

        Args:
            grad: the share's gradient, 1-D [d], any float dtype, accelerator; neither unscaled nor clipped.
            weights: the share's weights, 1-D [d], in the model's dtype, accelerator; written in place.
        """
        state = self._parts[index].state
        p = state[0]
        if p.numel():
            self._kind.step_rows(state, grad.view_as(p), self._updates[: len(p)], step)
            weights.copy_(p.view(-1))

    # -- outside of a step ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def show(self) -> None:
        """Copy p and the moments to the host, where they take memory until `hide`. Nothing of the arena may be in
        use."""
        for part in self._parts:
            for shown, values in zip(part.shown, part.state, strict=True):
                shown.copy_(values.view(-1))
        self._is_shown = True

    @torch.no_grad()
    def take(self) -> None:
        """Copy p and the moments back, which may have been written on the host."""
        for part in self._parts:
            for shown, values in zip(part.shown, part.state, strict=True):
                values.copy_(shown.view_as(values))
        self._is_shown = True

    @property
    def is_shown(self) -> bool:
        """Whether the host has memory for it."""
        return self._is_shown

    def hide(self) -> None:
        """Free the host memory of what is shown. The copies from there must have ended."""
        if self._is_shown:
            for index in range(len(self._parts)):
                for each in self._kind.layout.kinds:
                    self._arena.release_before(each, index)
            self._is_shown = False

    def tensors(self, index: int) -> list[torch.Tensor]:
        """What a partition's share keeps on the accelerator between steps."""
        return [*self._parts[index].state, *([self._updates] if index == 0 else [])]


@dataclass(frozen=True)
class ShareFacts:
    """What decides how much of the optimizer an accelerator can hold, as plain values.

    Attributes:
        numels: elements of this rank's partitions.
        free, total: bytes of the accelerator, now.
        reserve_fraction: of `total`, which stays free for activations and temporaries.
        later: bytes of gradients, of their flat copy and of DeepSpeed's buckets, none of which exists
            yet.
        beside: bytes that a partition takes besides for so many elements that step on the host:
            landing buffer and state of the rule.
    """

    numels: Sequence[int]
    block_size: int
    layout: StateLayout
    free: int
    total: int
    reserve_fraction: float
    later: int
    beside: Callable[[int], int]

    @property
    def room(self) -> int:
        """Bytes for the optimizer and what depends on its share."""
        return self.free - self.later - round(self.total * self.reserve_fraction)

    def bytes_at(self, host_share: float) -> int:
        """Bytes that the optimizer takes on the accelerator if `host_share` of it is on the host."""
        nbytes = 0
        for numel in self.numels:
            there = accelerator_numel(numel, host_share, self.block_size)
            nbytes += accelerator_share_bytes(there, self.block_size, self.layout)
            nbytes += self.beside(numel - there)
        return nbytes


def bytes_beside_share(
    settings: RuleSettings,
    publish_dtype: str,
    grad_dtype: str,
    weights_bytes: int,
    hides_transfers: bool,
    numel: int,
) -> int:
    """Bytes that a partition of `numel` elements, which step on the host, takes on the accelerator:
    its landing buffer, if copies may run beside the step, and the state of the rule.

    Args:
        weights_bytes: bytes of an element of the weights.
    """
    kept = settings.accelerator_bytes(numel, weights_bytes)
    if not hides_transfers:
        return kept
    arrays = arena_specs(settings, [numel], publish_dtype, grad_dtype)
    means = sum(each.nbytes for each in arrays if each.kind in ("block_means", "known"))
    return kept + landing_bytes(numel, grad_dtype, publish_dtype, means)


def units_that_fit(facts: ShareFacts) -> int:
    """The largest share on the accelerator for which there is room, in units of `_SMALLEST_STEP`; 0
    if there is none for any. A pure function. An element takes more bytes where it steps there."""
    shares = range(round(1 / _SMALLEST_STEP) + 1)
    taken = bisect_right(shares, facts.room, key=lambda u: facts.bytes_at(1.0 - u * _SMALLEST_STEP))
    return max(taken - 1, 0)


def host_share_that_fits(facts: Callable[[], ShareFacts], ranks: RankGroup) -> float:
    """The smallest share on the host, so that the rest of every rank's optimizer fits into its accelerator. A
    collective.

    Args:
        facts: finds this rank's; called only if the accelerator is not the CPU.
        ranks: the ranks that the model is spread over.

    Returns:
        The same on every rank, from 0 to 1; 1 if the accelerator is the CPU.
    """
    if get_accelerator().is_synchronized_device():
        return 1.0
    units, told = 0, ""
    with together(ranks):
        mine = facts()
        units = units_that_fit(mine)
        told = (
            f"of {mine.total:,} bytes of accelerator memory {mine.free:,} were free, gradients will take "
            f"{mine.later:,}, and {mine.reserve_fraction:.0%} stay free for activations "
            "(zenflow.offload_reserve_fraction)"
        )
    share = 1.0 - ranks.minimum(units)[0] * _SMALLEST_STEP
    if ranks.rank == 0:
        logger.info(f"offload_optimizer.ratio = {share:.4g}: {told}")
    return share
