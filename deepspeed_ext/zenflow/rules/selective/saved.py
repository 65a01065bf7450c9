"""Defines what a checkpoint holds of the selective rule, and the arithmetic of its blocks."""

from __future__ import annotations

from dataclasses import replace

import torch

from deepspeed_ext.zenflow.rules.saved_values import (
    GRADIENT_DTYPES,
    AdamState,
    Count,
    PartitionValues,
    SavedSchedule,
    StepValues,
    misfit,
)
from deepspeed_ext.zenflow.worker.kernel import AdamStep
from deepspeed_ext.zenflow.worker.kernel.reference import take_steps

__all__ = ["SelectivePartitionValues", "SelectiveSavedSchedule", "recorrect", "rows_of"]


def rows_of(flat: torch.Tensor, block_size: int) -> torch.Tensor:
    """View the whole blocks of a flat tensor, 1-D [n], as rows."""
    return flat[: flat.numel() // block_size * block_size].view(-1, block_size)


def recorrect(m: torch.Tensor, v: torch.Tensor, before: AdamStep, after: AdamStep) -> None:
    """Change moments of any shape in place, so that their bias-corrected values after the step
    `after` are those after `before`."""
    if before.step and before.step != after.step:
        m.mul_(after.bias_correction1 / before.bias_correction1)
        v.mul_((after.bias_correction2_sqrt / before.bias_correction2_sqrt) ** 2)


class SelectiveSavedSchedule(SavedSchedule):
    """The state of a `SelectiveSchedule`."""

    collected: Count
    is_in_flight: bool
    since_selection: Count


class SelectivePartitionValues(PartitionValues):
    """State of one partition; see `SelectionState`."""

    hot_blocks: torch.Tensor | None
    mean: torch.Tensor | None
    last: StepValues | None
    cold_updates: Count

    def mistakes(self, blocks: int, steps: int) -> list[str]:
        found = []
        if self.mean is not None:
            found.append(misfit(self.mean, self.on_host, GRADIENT_DTYPES, "mean"))
        if (hot := self.hot_blocks) is not None:
            found.append(misfit(hot, hot.numel(), (torch.int64,), "hot_blocks"))
            if not found[-1] and not _are_block_numbers(hot, blocks):
                found.append(f"hot_blocks has numbers that repeat or are not in 0 to {blocks - 1}")
        if self.last is None and steps:
            found.append(f"no constants of the newest update after {steps} steps")
        return super().mistakes(blocks, steps) + found

    def apply_collected(
        self, state: AdamState, block_size: int, begin: int = 0, moment_dtype: str = "float32"
    ) -> None:
        """Step the cold blocks with the mean of the collected gradients, and let all blocks have
        the hot ones' count."""
        if self.last is None:
            return
        p, m, v = state
        first, last = begin // block_size, self.last.make()
        hot = torch.empty(0, dtype=torch.int64) if self.hot_blocks is None else self.hot_blocks
        ids = hot[(hot >= first) & (hot < first + p.numel() // block_size)] - first
        kept = [rows_of(array, block_size)[ids] for array in state]
        cold = replace(last, step=self.cold_updates)
        if self.mean is not None:
            cold = replace(last, step=self.cold_updates + 1)
            mean = self.mean[begin : begin + p.numel()]
            take_steps(p, m, v, [mean], [cold], begin, moment_dtype, block_size)
        recorrect(m, v, cold, last)
        for array, rows in zip(state, kept, strict=True):
            rows_of(array, block_size)[ids] = rows


def _are_block_numbers(ids: torch.Tensor, count: int) -> bool:
    return ids.numel() == 0 or bool(
        (ids.unique().numel() == ids.numel()) and int(ids.min()) >= 0 and int(ids.max()) < count
    )
