"""Exchanges only the hot blocks between ranks after steps that changed nothing else (stages 1 and 2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from deepspeed_ext._agreement import RankGroup
from deepspeed_ext.zenflow.blocks import BlockSet
from deepspeed_ext.zenflow.optimizer import OffloadedAdam

__all__ = ["HotExchange"]


class HotExchange:
    """Replaces DeepSpeed's all-gather of weight partitions at the end of a step.

    Args:
        adam: knows which blocks of this rank's partitions a step has changed.
        all_gather: DeepSpeed's own function, called for steps that may have changed all blocks.

    Attributes:
        bytes_received: bytes received by this rank in the newest exchange of hot blocks.
    """

    def __init__(self, adam: OffloadedAdam, all_gather: Callable[..., None]) -> None:
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
            self._exchange(index, blocks, partitions)

    def _exchange(self, index: int, blocks: BlockSet, partitions: Sequence[torch.Tensor]) -> None:
        ranks = self._adam.ranks
        mine = partitions[ranks.rank].data
        if ranks.size == 1:
            return
        if index not in self._known or self._known[index][0] is not blocks:
            self._known[index] = blocks, _everyones(blocks, mine.numel(), ranks)
        everyones = self._known[index][1]
        most = max(map(len, everyones))
        rows = ranks.all_gather(_padded(blocks.take(mine), most))
        for other, (theirs, values) in enumerate(zip(everyones, rows, strict=True)):
            if other != ranks.rank:
                theirs.put(partitions[other].data, values[: len(theirs)])
                self.bytes_received += values.nbytes


def _everyones(blocks: BlockSet, numel: int, ranks: RankGroup) -> list[BlockSet]:
    """The hot blocks of every rank, in rank order. Partitions have one size; the number of blocks may differ per
    rank. A collective."""
    mine = torch.tensor([len(blocks)], dtype=torch.int64, device=ranks.device)
    counts = [int(count) for count in ranks.all_gather(mine)]
    ids = ranks.all_gather(_padded(blocks.ids, max(counts)))
    return [BlockSet(theirs[:count], numel, blocks.block_size) for theirs, count in zip(ids, counts, strict=True)]


def _padded(rows: torch.Tensor, count: int) -> torch.Tensor:
    """`rows` followed by zeros up to `count` rows, because a collective needs one shape on all ranks."""
    return torch.cat([rows, rows.new_zeros(count - len(rows), *rows.shape[1:])])
