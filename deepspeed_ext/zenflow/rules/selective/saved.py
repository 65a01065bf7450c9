"""Defines what a checkpoint holds of the selective rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from deepspeed_ext.zenflow.rules.blocks import step_blocks
from deepspeed_ext.zenflow.rules.saved_values import AdamState, PartitionValues, Shape
from deepspeed_ext.zenflow.worker.kernel.state_layout import StateLayout

__all__ = ["SelectivePartitionValues"]


@dataclass(frozen=True, kw_only=True)
class SelectivePartitionValues(PartitionValues):
    """State of one partition.

    Attributes:
        block_updates: updates of each block, int32 [blocks].
        hot_blocks: numbers of the hot blocks, int64; None: there are none yet.
    """

    block_updates: torch.Tensor
    hot_blocks: torch.Tensor | None = None

    def shapes(self, layout: StateLayout, block_size: int) -> Iterator[Shape]:
        yield from super().shapes(layout, block_size)
        blocks = -(-self.on_host // block_size)
        yield Shape("block_updates", self.block_updates, blocks, (torch.int32,))
        if (hot := self.hot_blocks) is not None:
            yield Shape("hot_blocks", hot, min(hot.numel(), blocks), (torch.int64,))

    def apply_collected(
        self, state: AdamState, block_size: int, begin: int = 0, moment_dtype: str = "float32"
    ) -> None:
        if not (steps := self.collected):
            return
        end, first = begin + state[0].numel(), begin // block_size
        counts = self.block_updates[first : -(-end // block_size)]
        hot = self.hot_blocks
        if hot is not None:
            hot = hot[(hot >= first) & (hot < first + counts.numel())] - first
        scales = [step.grad_scale / len(steps) for step in steps]
        scaled = [
            grad[begin:end].float() * scale
            for grad, scale in zip(self.gradients, scales, strict=True)
        ]
        last = replace(steps[-1], grad_scale=1.0)
        step_blocks(state, block_size, counts, hot, torch.stack(scaled).sum(0), last)
