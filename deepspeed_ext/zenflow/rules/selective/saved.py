"""Defines what a checkpoint holds of the selective rule, and the arithmetic of its blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from deepspeed_ext.zenflow.rules.saved_values import FLOATS, AdamState, PartitionValues, Tensors
from deepspeed_ext.zenflow.worker.kernel import AdamStep
from deepspeed_ext.zenflow.worker.kernel.definition import step_in_fp32
from deepspeed_ext.zenflow.worker.kernel.passes import StateLayout

__all__ = ["SelectivePartitionValues", "recorrect", "rows_of"]


def rows_of(flat: torch.Tensor, block_size: int) -> torch.Tensor:
    """View the whole blocks of a flat tensor, 1-D [n], as rows."""
    return flat[: flat.numel() // block_size * block_size].view(-1, block_size)


def recorrect(m: torch.Tensor, v: torch.Tensor, before: AdamStep, after: AdamStep) -> None:
    """Change moments of any shape in place, so that their bias-corrected values after the step
    `after` are those after `before`."""
    if before.step and before.step != after.step:
        m.mul_(after.bias_correction1 / before.bias_correction1)
        v.mul_((after.bias_correction2_sqrt / before.bias_correction2_sqrt) ** 2)


@dataclass(frozen=True, kw_only=True)
class SelectivePartitionValues(PartitionValues):
    """State of one partition; see `SelectionState`."""

    hot_blocks: torch.Tensor | None = None
    mean: torch.Tensor | None = None
    last: AdamStep | None = None
    cold_updates: int

    def tensors(self, layout: StateLayout, block_size: int) -> Tensors:
        if self.mean is not None:
            yield "mean", self.mean, self.on_host, FLOATS
        if (hot := self.hot_blocks) is not None:
            most = min(hot.numel(), self.on_host // block_size)
            yield "hot_blocks", hot, most, (torch.int64,)

    @property
    def is_behind(self) -> bool:
        return self.last is not None

    def apply_collected(
        self, state: AdamState, block_size: int, begin: int, layout: StateLayout
    ) -> None:
        """Step the cold blocks with the mean of the collected gradients, and let all blocks have
        the hot ones' count."""
        assert self.last is not None, "it is behind"
        p, m, v = state
        first = begin // block_size
        hot = (
            torch.empty(0, dtype=torch.int64, device="cpu")
            if self.hot_blocks is None
            else self.hot_blocks
        )
        ids = hot[(hot >= first) & (hot < first + p.numel() // block_size)] - first
        kept = [rows_of(array, block_size)[ids] for array in state]
        cold = replace(self.last, step=self.cold_updates)
        if self.mean is not None:
            cold = replace(cold, step=self.cold_updates + 1)
            mean = self.mean[begin : begin + p.numel()]
            step_in_fp32(layout, state, mean, cold, block_size, begin)
        recorrect(m, v, cold, self.last)
        for array, rows in zip(state, kept, strict=True):
            rows_of(array, block_size)[ids] = rows
