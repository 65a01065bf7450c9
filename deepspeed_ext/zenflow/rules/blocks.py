"""Selects blocks of a flat partition and runs Adam on them.

A partition of n elements is divided into blocks of `block_size` contiguous elements; the last may
be shorter. Parameter shapes play no role: selecting blocks reaches the same loss as selecting
columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deepspeed_ext.zenflow import kernels
from deepspeed_ext.zenflow.worker.kernel import AdamStep

__all__ = ["AdamBlocks", "BlockSet", "step_blocks"]

_CHUNK_BLOCKS = 1 << 14


class BlockSet:
    """A set of blocks, applicable to any partition of n elements.

    Args:
        ids: block numbers, 1-D int64, ascending, on the device where the blocks are used.
        numel: n.
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
        """Gather the set's blocks from a flat tensor.

        Args:
            flat: 1-D [n], any dtype, any device.

        Returns:
            [len(self), block_size], on the device of `flat`, one row per block; a short block is
            padded with zeros.
        """
        whole, ids = self._split(flat)
        rows = whole.index_select(0, ids)
        if not self._has_tail:
            return rows
        tail = torch.nn.functional.pad(flat[whole.numel() :], (0, self.block_size - self._tail))
        return torch.cat([rows, tail.view(1, -1)])

    def put(self, flat: torch.Tensor, rows: torch.Tensor) -> None:
        """Scatter blocks into a flat tensor, in place.

        Args:
            flat: 1-D [n], any dtype, any device.
            rows: [len(self), block_size], any dtype and device.
        """
        rows = rows.to(flat.device, flat.dtype)
        whole, ids = self._split(flat)
        whole.index_copy_(0, ids, rows[: ids.numel()])
        if self._has_tail:
            flat[whole.numel() :] = rows[-1, : self._tail]

    def _split(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """View the whole blocks of `flat` as rows; also return the set's whole-block numbers, on
        `flat`'s device."""
        ids = self.ids[:-1] if self._has_tail else self.ids
        return flat[: self._whole * self.block_size].view(-1, self.block_size), ids.to(flat.device)


@dataclass
class AdamBlocks:
    """Adam's state for a `BlockSet` of k blocks, outside the partition's own arrays.

    Attributes:
        p, m, v: fp32 [k, block_size], one row per block.
        updates: int32 [k], number of updates that each block has had.
    """

    blocks: BlockSet
    p: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor
    updates: torch.Tensor

    @torch.no_grad()
    def step(self, grad: torch.Tensor, step: AdamStep) -> torch.Tensor:
        """Take one Adam step.

        Computed in fp32 on grad's device as `worker.kernel.adam_pass` defines it, with each block's
        own update count. State that lives on another device is copied there and back. ``step.step``
        is not used.

        Args:
            grad: [k, block_size], any float dtype, any device.

        Returns:
            The new p, fp32 [k, block_size], on grad's device. Compute weights from it, not from the
            attribute `p`: that may be page-locked host memory whose asynchronous copy is still
            running.
        """
        state_device, device = self.p.device, grad.device
        p, m, v, updates = (
            t.to(device, non_blocking=True) for t in (self.p, self.m, self.v, self.updates)
        )
        updates.add_(1)
        kernels.hot_step(p, m, v, grad, updates, kernels.HotConstants.of(step))
        if state_device != device:
            for own, new in ((self.p, p), (self.m, m), (self.v, v), (self.updates, updates)):
                own.copy_(new, non_blocking=True)
        return p


@torch.no_grad()
def step_blocks(
    state: Sequence[torch.Tensor],
    block_size: int,
    counts: torch.Tensor,
    without: torch.Tensor | None,
    gradient: torch.Tensor,
    step: AdamStep,
) -> None:
    """Take one Adam step of p, m, v in place, for all blocks except those in `without`.

    Args:
        state: p, m, v; 1-D fp32 [n], host.
        counts: updates that each block has had; 1-D int32 [blocks], host.
        without: numbers of the blocks that keep their state; 1-D int64. None: no exception.
        gradient: 1-D [n], any float dtype, host.
        step: the constants; its grad_scale multiplies the gradient.
    """
    chosen = torch.ones(counts.numel(), dtype=torch.bool, device="cpu")
    if without is not None:
        chosen[without] = False
    for ids in chosen.nonzero().view(-1).split(_CHUNK_BLOCKS):
        blocks = BlockSet(ids, state[0].numel(), block_size)
        p, m, v = (blocks.take(array) for array in state)
        AdamBlocks(blocks, p, m, v, counts[ids].clone()).step(blocks.take(gradient), step)
        for array, rows in zip(state, (p, m, v), strict=True):
            blocks.put(array, rows)
