"""Accelerator memory in which gradients and results wait, so that their copies run beside the next
step."""

from __future__ import annotations

import torch

from deepspeed_ext.runtime import memory as allocation
from deepspeed_ext.runtime.backend import get_accelerator
from deepspeed_ext.runtime.ranks import RankGroup
from deepspeed_ext.zenflow.plan.places import Copies
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan


class LandingBuffer:
    """Device memory that holds the gradient of one partition of n elements, and then its results.

    A step that has computed its weights copies its gradient here. It goes to the host during the
    next forward, chunk by chunk, and y of a chunk comes back during backward.

    Note: [y follows its gradient]
    The gradient is at the end and y at the start. If their sizes are equal, y of a chunk overwrites
    its own gradient; otherwise it also overwrites those of earlier chunks, so chunks must travel in
    the order of their elements. No event orders the two copies: the worker has answered with y of a
    chunk, so its gradient has arrived on the host.

    Attributes:
        gradient, published: 1-D [n].
        means: the rule's per-block array, one row per block if a block has several elements; None:
            it has none.
    """

    gradient: torch.Tensor
    published: torch.Tensor
    means: torch.Tensor | None

    def __init__(self, plan: ZenFlowPlan, numel: int) -> None:
        self._plan, self._numel = plan, numel
        self.allocate()

    def allocate(self) -> None:
        """Allocate the memory, with undefined contents."""
        plan, numel = self._plan, self._numel
        device = torch.device(get_accelerator().current_device_name())
        gradient = getattr(torch, plan.gradient_dtype)
        published = getattr(torch, plan.caller.weights_dtype)
        nbytes = numel * max(gradient.itemsize, published.itemsize)
        buffer = allocation.accelerator_empty(nbytes, torch.uint8, device)
        self.gradient = buffer[buffer.numel() - numel * gradient.itemsize :].view(gradient)
        self.published, self.means = buffer[: numel * published.itemsize].view(published), None
        if plan.lifts_per_block:
            blocks, width = -(-numel // plan.rule.block_size), plan.rule.per_block_width
            size = (blocks,) if width == 1 else (blocks, width)
            self.means = torch.empty(
                size, dtype=getattr(torch, plan.rule.layout.per_block[1]), device=device
            )

    def release(self) -> None:
        """Free the memory. Until `allocate`, the buffer has neither gradient nor results."""
        del self.gradient, self.published, self.means


def landing_buffers(plan: ZenFlowPlan, ranks: RankGroup) -> list[LandingBuffer] | None:
    """Allocate the plan's landing buffers; None on every rank if a rank has no memory for them. A
    collective if the plan has any."""
    if plan.copies is not Copies.BESIDE_STEP:
        return []
    return allocation.try_on_all_ranks(
        "zenflow.landing_buffers",
        lambda: [LandingBuffer(plan, each.on_host) for each in plan.partitions],
        ranks,
    )
