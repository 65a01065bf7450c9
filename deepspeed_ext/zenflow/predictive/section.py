"""Defines what a checkpoint holds of the predictive rule."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field, FiniteFloat

from deepspeed_ext.zenflow.blocks import step_blocks
from deepspeed_ext.zenflow.kernel import Publish
from deepspeed_ext.zenflow.section_parts import GRADIENT_DTYPES, AdamState, PartitionValues, SavedValues, misfit

__all__ = ["PredictivePartitionValues"]


class PublishValues(SavedValues):
    """A `Publish` as plain values."""

    p_factor: FiniteFloat
    m_factor: FiniteFloat
    l2_factor: FiniteFloat
    l2_bound: FiniteFloat
    bias_correction2_sqrt: Annotated[FiniteFloat, Field(gt=0)]
    eps: FiniteFloat

    def make(self) -> Publish:
        """Build the `Publish`."""
        return Publish(**dict(self))


class PredictivePartitionValues(PartitionValues):
    """State of one partition."""

    publish: PublishValues | None
    drift: torch.Tensor | None
    inverse: torch.Tensor | None

    def mistakes(self, blocks: int, steps: int) -> list[str]:
        found = [misfit(self.drift, self.numel, GRADIENT_DTYPES, "drift")] if self.drift is not None else []
        if self.inverse is not None:
            found.append(misfit(self.inverse, blocks, (torch.float32,), "inverse"))
        if steps and self.publish is None:
            found.append(f"no publish after {steps} steps")
        if self.collected and (self.drift is None or self.inverse is None):
            found.append("collected gradients without drift and inverse")
        return super().mistakes(blocks, steps) + found

    def apply_collected(self, state: AdamState, block_size: int, begin: int = 0) -> None:
        numel = state[0].numel()
        for step, gradient in zip(self.steps, self.gradients, strict=True):
            counts = torch.full((-(-numel // block_size),), step.step - 1, dtype=torch.int32, device="cpu")
            step_blocks(state, block_size, counts, None, gradient[begin : begin + numel], step)
