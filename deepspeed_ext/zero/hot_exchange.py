"""Stages 1 and 2 under the selective rule: in most steps only hot blocks have changed, and only they travel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from deepspeed_ext._upstream import dist
from deepspeed_ext.zenflow.blocks import BlockSet
from deepspeed_ext.zenflow.selective import SelectiveAdam

__all__ = ["HotExchange"]


class HotExchange:
    """Stands in for DeepSpeed's all-gather of 16-bit partitions at the end of a step.

    Args:
        adam: knows which blocks of this rank's partitions a step has changed.
        all_gather: DeepSpeed's own function, which serves the steps that may have changed everything.

    Attributes:
        bytes_received: by this rank in the newest exchange of hot blocks.
    """

    def __init__(self, adam: SelectiveAdam, all_gather: Callable[..., None]) -> None:
        self._adam = adam
        self._all_gather = all_gather
        self._known: dict[int, tuple[BlockSet, list[BlockSet]]] = {}
        self.bytes_received = 0

    def __call__(
        self, groups_flat: Any, partitioned_param_groups: Any, dp_process_group: Any, *args: Any, **kwargs: Any
    ) -> None:
        changed = [self._adam.changed_blocks(index) for index in range(len(partitioned_param_groups))]
        if any(blocks is None for blocks in changed):
            self._all_gather(groups_flat, partitioned_param_groups, dp_process_group, *args, **kwargs)
            return
        self.bytes_received = 0
        for index, (blocks, partitions) in enumerate(zip(changed, partitioned_param_groups, strict=True)):
            assert blocks is not None
            self._exchange(index, blocks, partitions, dp_process_group[index])

    def _exchange(self, index: int, blocks: BlockSet, partitions: Sequence[torch.Tensor], group: Any) -> None:
        size, rank = dist.get_world_size(group=group), dist.get_rank(group=group)
        if size == 1 or len(blocks) == 0:
            return
        if index not in self._known or self._known[index][0] is not blocks:
            ids = _gathered(blocks.ids, size, group)
            numel = partitions[rank].numel()
            self._known[index] = blocks, [BlockSet(theirs, numel, blocks.block_size) for theirs in ids]
        rows = _gathered(blocks.take(partitions[rank].data), size, group)
        for other, (theirs, values) in enumerate(zip(self._known[index][1], rows, strict=True)):
            if other != rank:
                theirs.put(partitions[other].data, values)
                self.bytes_received += values.nbytes


def _gathered(mine: torch.Tensor, size: int, group: Any) -> list[torch.Tensor]:
    """`mine` of every rank; they have one shape, because partitions of a group have one size."""
    found = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(found, mine, group=group)
    return found
