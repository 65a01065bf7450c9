"""Launches the collectives of one fetch, which gather parameters into their own storage.

A *partition* is this rank's shard of a parameter: 1-D, equally long on every rank; the last one
ends with padding. *Storage* is the gathered parameter's memory: 1-D, on the accelerator, in the
dtype of the communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_ext.runtime.backend import dist
from deepspeed_ext.runtime.ranks import RankGroup, all_gather_single

_SEGMENT_BYTES = 64
"""Alignment of parameters in a shared bucket, as by the CPU allocator: kernels may depend on it."""


@dataclass
class PendingParameter:
    """One parameter that is being gathered.

    Attributes:
        numel: elements of the whole parameter.
        partition: this rank's shard: 1-D, on any device, in the parameter's dtype.
        dtype: dtype of the communication.
        storage: the parameter's elements, 1-D without padding; set at launch, valid once the work
            is done.
    """

    numel: int
    partition: torch.Tensor
    dtype: torch.dtype
    storage: torch.Tensor | None = None


def can_group(ranks: RankGroup) -> bool:
    """Whether the backend of `ranks` can group several collectives into one launch, as NCCL can and
    gloo cannot."""
    return bool(getattr(ranks.backend, "supports_coalescing", False))


def gather_singles(
    pending: Sequence[PendingParameter], ranks: RankGroup, grouped: bool
) -> list[Any]:
    """Start to gather every partition directly into its parameter's own storage, in the same order
    on every rank; do not wait, which each of the results can. `grouped`: in one launch, which
    requires `can_group`."""
    pairs = [_output_and_input(each, ranks) for each in pending]
    # a parameter may be empty
    pairs = [(output, part) for output, part in pairs if output.numel() > 0]
    if not grouped or len(pairs) <= 1:
        return [
            dist.allgather_fn(output, part, group=ranks.group, async_op=True)
            for output, part in pairs
        ]
    # torch's interface, because the work of deepspeed.comm.all_gather_coalesced has no usable wait.
    # As bytes, because not every backend accepts several dtypes in one launch.
    manager: Any
    with torch.distributed._coalescing_manager(group=ranks.group, async_ops=True) as manager:
        for output, part in pairs:
            all_gather_single(
                output.view(torch.uint8), part.view(torch.uint8), group=ranks.group, async_op=True
            )
    return [manager]


def _output_and_input(
    each: PendingParameter, ranks: RankGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    part_numel = each.partition.numel()
    output = torch.empty(part_numel * ranks.size, dtype=each.dtype, device=ranks.device)
    each.storage = output.narrow(0, 0, each.numel)
    if each.partition.device == output.device and each.partition.dtype == each.dtype:
        return output, each.partition.data
    own = output.narrow(0, part_numel * ranks.rank, part_numel)
    own.copy_(each.partition)  # move or cast into the output; the all-gather is then in place
    return output, own


def gather_together(pending: Sequence[PendingParameter], ranks: RankGroup) -> Any:
    """Start to gather small parameters by one collective into shared storage, each of them
    contiguous; do not wait.

    An all-gather would interleave the parameters rank by rank, and separating them would need a
    second copy. Instead, every rank copies its parts to their final positions in a zeroed bucket,
    and an all-reduce adds the buckets as integers. Each element is x on one rank and 0 on the
    others, so every bit of x arrives, also for -0.0 and NaN. Dtypes may differ.
    """
    offsets = [0]
    for each in pending:
        nbytes = each.numel * each.dtype.itemsize
        offsets.append(offsets[-1] + -(-nbytes // _SEGMENT_BYTES) * _SEGMENT_BYTES)
    bucket = torch.zeros(offsets[-1], dtype=torch.uint8, device=ranks.device)
    typed = {dtype: bucket.view(dtype) for dtype in {each.dtype for each in pending}}
    for each, offset in zip(pending, offsets, strict=False):
        first = offset // each.dtype.itemsize
        numel, part_numel = each.numel, each.partition.numel()
        each.storage = typed[each.dtype].narrow(0, first, numel)
        start = part_numel * ranks.rank
        valid = min(part_numel, numel - start)  # without the padding of the last ranks
        if valid > 0:
            part = each.partition if valid == part_numel else each.partition.narrow(0, 0, valid)
            typed[each.dtype].narrow(0, first + start, valid).copy_(part)
    return dist.all_reduce(bucket.view(torch.int64), group=ranks.group, async_op=True)
