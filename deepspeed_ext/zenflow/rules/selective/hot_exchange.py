"""Exchanges only the hot blocks between ranks after steps that changed nothing else (stages 1 and
2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from deepspeed_ext.runtime.ranks import RankGroup
from deepspeed_ext.zenflow.rules.blocks import BlockSet, BlocksOfRanks
from deepspeed_ext.zenflow.rules.selective.rule import SelectiveRule
from deepspeed_ext.zenflow.rules.selective.schedule import SelectivePlan
from deepspeed_ext.zenflow.step.optimizer import HostOptimizer

__all__ = ["HotExchange"]


class HotExchange:
    """Replaces DeepSpeed's all-gather of weight partitions at the end of a step.

    Args:
        host: the optimizer, with the selective rule.
        all_gather: DeepSpeed's function, called after steps that may have changed all blocks.

    Attributes:
        bytes_received: bytes received by this rank in the newest exchange of hot blocks.
    """

    def __init__(self, host: HostOptimizer, all_gather: Callable[..., None]) -> None:
        self._host = host
        self._all_gather = all_gather
        self._known: dict[int, tuple[BlockSet, BlockSet, BlocksOfRanks]] = {}
        self.bytes_received = 0

    def __call__(
        self,
        groups_flat: Any,
        partitioned_param_groups: Any,
        dp_process_group: Any,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        changed = [self._changed(index) for index in range(len(partitioned_param_groups))]
        if any(blocks is None for blocks in changed):
            self._all_gather(
                groups_flat, partitioned_param_groups, dp_process_group, *args, **kwargs
            )
            return
        self.bytes_received = 0
        for index, (blocks, flat) in enumerate(zip(changed, groups_flat, strict=True)):
            assert blocks is not None
            ranks = self._host.partitions[index].ranks
            self._exchange(index, blocks, flat.data.view(ranks.size, -1), ranks)

    def _changed(self, index: int) -> BlockSet | None:
        """The blocks of a partition whose weights the current step changes; None: all may
        change."""
        if self._host.share is not None:  # its weights change in every step
            return None
        rule, plan = cast(SelectiveRule, self._host.rule), self._host.plan
        assert plan is not None, "valid only inside a step"
        return rule.changed_blocks(cast(SelectivePlan, plan), self._host.partitions[index])

    def _exchange(
        self, index: int, blocks: BlockSet, weights: torch.Tensor, ranks: RankGroup
    ) -> None:
        """Exchange `blocks` of this rank's row of the `weights`, [ranks, n]."""
        if ranks.size == 1:
            return
        if index not in self._known or self._known[index][0] is not blocks:
            self._known[index] = blocks, *_gathered(blocks, weights, ranks)
        _, mine, of_ranks = self._known[index]
        rows = ranks.all_gather(mine.take(weights[ranks.rank]))
        of_ranks.put(weights, rows)
        self.bytes_received += rows.nbytes - rows[0].nbytes


def _gathered(
    blocks: BlockSet, weights: torch.Tensor, ranks: RankGroup
) -> tuple[BlockSet, BlocksOfRanks]:
    """This rank's hot blocks and those of every rank, on the device of the `weights`, [ranks, n]. A
    collective.

    The number of blocks may differ per rank, but a collective needs one shape. So shorter rows are
    padded at the start with block 0, which may be sent twice without harm.
    """
    most = -ranks.minimum(-len(blocks))[0]
    ids = torch.cat([blocks.ids.new_zeros(most - len(blocks)), blocks.ids]).to(weights.device)
    numel = weights.shape[1]
    return BlockSet(ids, numel, blocks.block_size), BlocksOfRanks(
        ranks.all_gather(ids), numel, blocks.block_size
    )
