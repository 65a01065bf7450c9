"""Selects the hot blocks: those with the largest gradients over all ranks."""

from __future__ import annotations

import torch

from deepspeed_ext.zenflow.selective.settings import hot_blocks, most_hot_blocks

__all__ = ["scores", "select"]


def scores(flat: torch.Tensor, block_size: int) -> torch.Tensor:
    """Score every block of a flat gradient by its sum of absolute values.

    Args:
        flat: 1-D [n], any float dtype, any device.
        block_size: elements per block.

    Returns:
        1-D fp32 [ceil(n / block_size)], on the same device.
    """
    whole = flat.numel() // block_size * block_size
    sums = torch.linalg.vector_norm(flat[:whole].view(-1, block_size), ord=1, dim=1, dtype=torch.float32)
    if whole == flat.numel():
        return sums
    return torch.cat([sums, flat[whole:].float().abs().sum().view(1)])


def select(all_scores: torch.Tensor, ratio: float) -> list[torch.Tensor]:
    """Choose the blocks with the largest scores over all ranks.

    In total ``ratio`` of all blocks are chosen, rounded up, independent of how blocks are distributed over ranks. But
    no rank gets more than `most_hot_blocks`: hot blocks cost memory, and all ranks wait for the one with the most.

    Args:
        all_scores: fp32 [ranks, blocks], one row per rank.
        ratio: share of the blocks to choose, between 0 and 1.

    Returns:
        Block numbers per rank, 1-D int64, ascending.
    """
    ranks, count = all_scores.shape
    most = most_hot_blocks(count, ratio)
    best = torch.topk(all_scores, most, dim=1)
    chosen = torch.topk(best.values.flatten(), hot_blocks(all_scores.numel(), ratio), sorted=False).indices
    taken = torch.zeros(ranks * most, dtype=torch.bool, device=all_scores.device)
    taken[chosen] = True
    return [ids[row].sort().values for ids, row in zip(best.indices, taken.view(ranks, most), strict=True)]
