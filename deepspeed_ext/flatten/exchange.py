"""Exchanges the ranks' slices of a flat buffer, by the collective that suits the backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from deepspeed_ext.runtime.backend import dist
from deepspeed_ext.runtime.ranks import RankGroup

__all__ = ["Exchange", "all_gather", "broadcasts", "exchange_for", "exchange_of"]

Exchange: TypeAlias = Callable[[torch.Tensor, RankGroup, int], None]
"""Copies every rank's slice of `flat` to all other ranks, in place. A collective.

Args:
    flat: flat buffer; 1-D, on the ranks' device, its length a multiple of the number of ranks.
    ranks: the ranks, each with its own slice filled in.
    bucket_numel: maximum number of elements per broadcast.
"""

_GATHERS_IN_PLACE = frozenset({"nccl"})
"""Backends whose all-gather needs no temporary buffer if each rank's input is its slice of the
output."""


def exchange_of(ranks: RankGroup) -> Exchange:
    """Choose the exchange for `ranks`. Call it before parameters are freed, while a failure is
    harmless."""
    return exchange_for(backend_of(ranks)) if ranks.size > 1 else _nothing


def _nothing(flat: torch.Tensor, ranks: RankGroup, bucket_numel: int) -> None:
    """The exchange of a single rank."""


def exchange_for(backend: str) -> Exchange:
    """Choose the exchange for the backend of this name."""
    return all_gather if backend in _GATHERS_IN_PLACE else broadcasts


def backend_of(ranks: RankGroup) -> str:
    """Return the name of the backend for tensors on the ranks' device."""
    return str(ranks.backend.name()).lower()


def all_gather(flat: torch.Tensor, ranks: RankGroup, bucket_numel: int) -> None:
    """Exchange by one collective over the whole buffer, which uses all links at once.

    It ignores `bucket_numel`: the ranks' parts of a bucket are not contiguous in `flat` and would
    need a copy.
    """
    numel = flat.numel() // ranks.size
    dist.all_gather_into_tensor(
        flat, flat[ranks.rank * numel : (ranks.rank + 1) * numel], group=ranks.group
    )


def broadcasts(flat: torch.Tensor, ranks: RankGroup, bucket_numel: int) -> None:
    """Exchange by broadcasts of views of `flat`, one owner after the other, which needs no
    temporary buffer on any backend."""
    numel = flat.numel() // ranks.size
    for owner in range(ranks.size):
        for bucket in flat[owner * numel : (owner + 1) * numel].split(max(1, bucket_numel)):
            dist.broadcast(bucket, src=ranks.global_rank(owner), group=ranks.group)
