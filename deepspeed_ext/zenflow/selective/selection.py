"""Which blocks are hot: those with the largest gradients over all ranks."""

from __future__ import annotations

import math

import torch

__all__ = ["scores", "select"]

BALANCE = 2


def scores(flat: torch.Tensor, block_size: int) -> torch.Tensor:
    """Sum of absolute values of each block of `flat` (1-D): 1-D fp32, ceil(n / block_size) elements."""
    whole = flat.numel() // block_size * block_size
    sums = torch.linalg.vector_norm(flat[:whole].view(-1, block_size), ord=1, dim=1, dtype=torch.float32)
    if whole == flat.numel():
        return sums
    return torch.cat([sums, flat[whole:].float().abs().sum().view(1)])


def select(all_scores: torch.Tensor, ratio: float) -> list[torch.Tensor]:
    """Numbers of the blocks with the largest scores over all ranks, for each rank: 1-D int64, ascending.

    In all `ratio` of the blocks, rounded up, so that the choice does not depend on who holds which; but no rank takes
    more than `BALANCE` times its share, because hot blocks cost memory and the others wait for whoever has most.

    Args:
        all_scores: fp32, one row per rank.
    """
    ranks, count = all_scores.shape
    most = min(count, BALANCE * math.ceil(ratio * count))
    best = torch.topk(all_scores, most, dim=1)
    chosen = torch.topk(best.values.flatten(), math.ceil(ratio * all_scores.numel()), sorted=False).indices
    taken = torch.zeros(ranks * most, dtype=torch.bool, device=all_scores.device)
    taken[chosen] = True
    return [ids[row].sort().values for ids, row in zip(best.indices, taken.view(ranks, most), strict=True)]
