"""Selects the hot blocks: those with the largest gradients over all ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from deepspeed_ext.runtime.ranks import RankGroup
from deepspeed_ext.zenflow.plan.selective import hot_blocks, most_hot_blocks

__all__ = ["scores", "select"]

_DIGIT_BITS = 8
_DIGITS = 1 << _DIGIT_BITS


def scores(flat: torch.Tensor, block_size: int) -> torch.Tensor:
    """Score every block of a flat gradient by its sum of absolute values.

    Args:
        flat: 1-D [n], any float dtype, any device.

    Returns:
        1-D fp32 [ceil(n / block_size)], on the same device.
    """
    whole = flat.numel() // block_size * block_size
    sums = torch.linalg.vector_norm(
        flat[:whole].view(-1, block_size), ord=1, dim=1, dtype=torch.float32
    )
    if whole == flat.numel():
        return sums
    return torch.cat([sums, flat[whole:].float().abs().sum().view(1)])


def select(
    scores: torch.Tensor,
    ratio: float,
    ranks: RankGroup,
    deferring_errors: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> torch.Tensor:
    """Choose this rank's blocks among those with the largest scores over all ranks. A collective.

    In total ``ratio`` of all blocks are chosen, rounded up, however the blocks are distributed over
    ranks. But no rank gets more than `most_hot_blocks`: hot blocks take memory, and all ranks wait
    for the one with the most. Of equal scores at the limit, those of the lowest ranks and block
    numbers are chosen.

    Ranks exchange only counts of scores per digit: they find the smallest score to choose digit by
    digit, as in a radix sort. So the exchange takes a few KB for any model size.

    Args:
        scores: fp32 [blocks], none negative; the same number on every rank.
        ratio: share of the blocks to choose, between 0 and 1.
        deferring_errors: context for this rank's own work between collectives. If it keeps an
            error, the result is invalid.

    Returns:
        Block numbers, 1-D int64, ascending, on the device of the scores.
    """
    count = scores.numel()
    candidates = torch.empty(0, dtype=torch.int64, device=scores.device)
    bits = candidates.int()
    with deferring_errors():
        candidates = torch.topk(scores, most_hot_blocks(count, ratio)).indices.sort().values
        # non-negative floats keep their order as integers
        bits = scores[candidates].abs().view(torch.int32)
    left, smallest = hot_blocks(ranks.size * count, ratio), 0
    for shift in range(32 - _DIGIT_BITS, -1, -_DIGIT_BITS):
        counts = torch.zeros(_DIGITS, dtype=torch.int64, device=ranks.device)
        with deferring_errors():
            digits = (
                bits if shift + _DIGIT_BITS == 32 else bits[bits >> shift + _DIGIT_BITS == smallest]
            )
            counts += torch.bincount(digits >> shift & _DIGITS - 1, minlength=_DIGITS).to(
                counts.device
            )
        ranks.add_up(counts)
        digit, left = _digit_of(counts.tolist(), left)
        smallest = smallest << _DIGIT_BITS | digit
    equal, mine = bits.bool(), torch.zeros(1, dtype=torch.int64, device=ranks.device)
    with deferring_errors():
        equal = bits == smallest
        mine += equal.sum().to(mine.device)
    before = ranks.all_gather(mine)[: ranks.rank].sum().to(scores.device)
    with deferring_errors():
        candidates = candidates[(bits > smallest) | (equal & (equal.cumsum(0) <= left - before))]
    return candidates  # noqa: RET504


def _digit_of(counts: list[int], left: int) -> tuple[int, int]:
    """The digit of the `left`-th largest number, if `counts` numbers have each digit; and how many
    numbers with this digit to choose."""
    digit = len(counts) - 1
    while digit and counts[digit] < left:
        left -= counts[digit]
        digit -= 1
    return digit, left
