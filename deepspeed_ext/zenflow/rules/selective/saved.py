"""Defines what a checkpoint holds of the selective rule."""

from __future__ import annotations

from dataclasses import replace

import torch

from deepspeed_ext.zenflow.rules.blocks import step_blocks
from deepspeed_ext.zenflow.rules.saved_values import (
    AdamState,
    Count,
    PartitionValues,
    SavedSchedule,
    misfit,
)

__all__ = ["SelectivePartitionValues", "SelectiveSavedSchedule"]


class SelectiveSavedSchedule(SavedSchedule):
    """The state of a `SelectiveSchedule`."""

    steps_in_flight: Count | None
    since_selection: Count


class SelectivePartitionValues(PartitionValues):
    """State of one partition."""

    block_updates: torch.Tensor
    hot_blocks: torch.Tensor | None

    def mistakes(self, blocks: int, steps: int) -> list[str]:
        found = [misfit(self.block_updates, blocks, (torch.int32,), "block_updates")]
        if not found[0] and bool((self.block_updates < 0).any()):
            found.append("block_updates has negative counts")
        if (hot := self.hot_blocks) is not None:
            found.append(misfit(hot, hot.numel(), (torch.int64,), "hot_blocks"))
            if not found[-1] and not _are_block_numbers(hot, blocks):
                found.append(f"hot_blocks has numbers that repeat or are not in 0 to {blocks - 1}")
        return super().mistakes(blocks, steps) + found

    def apply_collected(
        self, state: AdamState, block_size: int, begin: int = 0, moment_dtype: str = "float32"
    ) -> None:
        if not (steps := self.steps):
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


def _are_block_numbers(ids: torch.Tensor, count: int) -> bool:
    return ids.numel() == 0 or bool(
        (ids.unique().numel() == ids.numel()) and int(ids.min()) >= 0 and int(ids.max()) < count
    )
