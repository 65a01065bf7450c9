"""The exchange of slices inside a flat buffer, in the way that suits the backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from deepspeed_ext._agreement import RankGroup
from deepspeed_ext._upstream import dist

__all__ = ["all_gather", "broadcasts", "exchange", "exchange_for"]

Exchange: TypeAlias = Callable[[torch.Tensor, RankGroup, int], None]

_GATHERS_IN_PLACE = frozenset({"nccl"})
"""Backends whose all-gather needs no temporary if every rank's input is its own place in the output."""


def exchange(flat: torch.Tensor, ranks: RankGroup, bucket_numel: int) -> None:
    """All-gather in place: every rank's slice of `flat` (1-D, a multiple of the ranks) reaches the others.

    Args:
        bucket_numel: elements that one broadcast moves at most.
    """
    if ranks.size > 1:
        exchange_for(backend_of(ranks))(flat, ranks, bucket_numel)


def exchange_for(backend: str) -> Exchange:
    """How the backend of that name exchanges slices."""
    return all_gather if backend in _GATHERS_IN_PLACE else broadcasts


def backend_of(ranks: RankGroup) -> str:
    """Name of the backend that communicates tensors on the ranks' device."""
    group: Any = torch.distributed.group.WORLD if ranks.group is None else ranks.group
    return str(group._get_backend(ranks.device).name()).lower()


def all_gather(flat: torch.Tensor, ranks: RankGroup, bucket_numel: int) -> None:
    """One collective over the whole buffer, which uses all links at once.

    Not in buckets: the ranks' parts of a bucket are not contiguous in `flat`, which would cost a temporary.
    """
    numel = flat.numel() // ranks.size
    dist.all_gather_into_tensor(flat, flat[ranks.rank * numel : (ranks.rank + 1) * numel], group=ranks.group)


def broadcasts(flat: torch.Tensor, ranks: RankGroup, bucket_numel: int) -> None:
    """One owner after the other sends views of the buffer itself, which costs no backend a temporary."""
    numel = flat.numel() // ranks.size
    for owner in range(ranks.size):
        for bucket in flat[owner * numel : (owner + 1) * numel].split(max(1, bucket_numel)):
            dist.broadcast(bucket, src=ranks.global_rank(owner), group=ranks.group)
