"""Blocks of a flat partition, and Adam on some of them.

A partition of n elements is cut into blocks of `block_size` contiguous elements; the last may be shorter. No shapes of
parameters come into it: blocks select as well as columns do, in the loss that a run reaches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from deepspeed_ext.zenflow.kernel import AdamStep

__all__ = ["AdamBlocks", "BlockSet", "step_blocks"]

_CHUNK_BLOCKS = 1 << 14


class BlockSet:
    """Some blocks of partitions of n elements.

    Args:
        ids: numbers of the blocks, 1-D int64, ascending, on the device where the blocks are used.
        numel: n.
        block_size: elements of a block.
    """

    def __init__(self, ids: torch.Tensor, numel: int, block_size: int) -> None:
        self.ids = ids
        self.block_size = block_size
        self._whole = numel // block_size
        self._tail = numel % block_size
        self._has_tail = bool(self._tail and ids.numel() and int(ids[-1]) == self._whole)

    def __len__(self) -> int:
        return self.ids.numel()

    def take(self, flat: torch.Tensor) -> torch.Tensor:
        """The blocks of `flat` (1-D, n elements), a row each, on its device; a short block is padded with zeros."""
        whole, ids = self._split(flat)
        rows = whole.index_select(0, ids)
        if not self._has_tail:
            return rows
        tail = torch.nn.functional.pad(flat[whole.numel() :], (0, self.block_size - self._tail))
        return torch.cat([rows, tail.view(1, -1)])

    def put(self, flat: torch.Tensor, rows: torch.Tensor) -> None:
        """Write `rows`, of `take`'s shape and any dtype and device, into `flat`."""
        rows = rows.to(flat.device, flat.dtype)
        whole, ids = self._split(flat)
        whole.index_copy_(0, ids, rows[: ids.numel()])
        if self._has_tail:
            flat[whole.numel() :] = rows[-1, : self._tail]

    def _split(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`flat`'s whole blocks as rows, and the numbers of those that are in the set, on `flat`'s device."""
        ids = self.ids[:-1] if self._has_tail else self.ids
        return flat[: self._whole * self.block_size].view(-1, self.block_size), ids.to(flat.device)


@dataclass
class AdamBlocks:
    """Adam's state of a `BlockSet`, away from the partition's own arrays.

    Attributes:
        blocks: which.
        p, m, v: fp32, a row a block.
        updates: how many each block has had; int32, one a block.
    """

    blocks: BlockSet
    p: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor
    updates: torch.Tensor

    @torch.no_grad()
    def step(self, grad: torch.Tensor, grad_scale: float, step: AdamStep) -> torch.Tensor:
        """One Adam step with ``grad_scale * grad``, a row per block, any float dtype, on whatever device.

        Computed in fp32 on grad's device, as `kernel.adam_pass` defines it, with each block's own update count; state
        that lives elsewhere is copied there and back. ``step.step`` and ``step.grad_scale`` are not used.

        Returns:
            The new p on grad's device: fp32, a row per block. Weights are to be written from this one. The attribute
            `p` may be page-locked host memory that the copy back reaches only later; a read of it by the host, and a
            copy from it that converts on the host, would see the step before or a mixture.
        """
        home, device = self.p.device, grad.device
        p, m, v, updates = (t.to(device, non_blocking=True) for t in (self.p, self.m, self.v, self.updates))
        g = grad.float() * grad_scale
        if step.weight_decay and not step.decoupled:
            g.add_(p, alpha=step.weight_decay)
        updates.add_(1)
        m.lerp_(g, 1.0 - step.beta1)
        v.mul_(step.beta2).addcmul_(g, g, value=1.0 - step.beta2)
        # 1 - beta^t, exact also for small t where 1 - beta**t would cancel in fp32.
        times = updates[:, None].float()
        correction1, correction2 = (-torch.expm1(times * math.log(beta)) for beta in (step.beta1, step.beta2))
        if step.decoupled:
            p.mul_(1.0 - step.lr * step.weight_decay)
        denominator = v.sqrt().div_(correction2.sqrt_()).add_(step.eps)
        p.addcdiv_(m / correction1, denominator, value=-step.lr)
        if home != device:
            for own, new in ((self.p, p), (self.m, m), (self.v, v), (self.updates, updates)):
                own.copy_(new, non_blocking=True)
        return p


@torch.no_grad()
def step_blocks(
    state: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    block_size: int,
    counts: torch.Tensor,
    without: torch.Tensor | None,
    gradient: torch.Tensor,
    step: AdamStep,
) -> None:
    """One Adam step of p, m, v in place, of all blocks but some.

    Args:
        state: p, m, v; 1-D fp32 [n], host.
        block_size: elements of a block.
        counts: updates that each block has had; 1-D int32, host.
        without: numbers of the blocks that keep their state; 1-D int64.
        gradient: 1-D [n], any float dtype, host.
        step: the constants; its grad_scale multiplies the gradient.
    """
    chosen = torch.ones(counts.numel(), dtype=torch.bool, device="cpu")
    if without is not None:
        chosen[without] = False
    for ids in chosen.nonzero().view(-1).split(_CHUNK_BLOCKS):
        blocks = BlockSet(ids, state[0].numel(), block_size)
        p, m, v = (blocks.take(array) for array in state)
        AdamBlocks(blocks, p, m, v, counts[ids].clone()).step(blocks.take(gradient), step.grad_scale, step)
        for array, rows in zip(state, (p, m, v), strict=True):
            blocks.put(array, rows)
