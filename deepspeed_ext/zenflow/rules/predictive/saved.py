"""Defines what a checkpoint holds of the predictive rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_ext.zenflow.rules.predictive.guard import PredictionErrors
from deepspeed_ext.zenflow.rules.saved_values import PartitionValues, Tensors
from deepspeed_ext.zenflow.worker.kernel.passes import StateLayout

__all__ = ["PredictivePartitionValues"]


@dataclass(frozen=True, kw_only=True)
class PredictivePartitionValues(PartitionValues):
    """State of one partition.

    Attributes:
        last: constants of the newest gradient that was handed over.
        errors: errors of the newest probe, if the guard has not judged it yet.
        inverse: what the estimate remembers (`Estimate.kept`).
    """

    last: Any = None
    errors: PredictionErrors | None = None
    inverse: torch.Tensor | None = None

    def tensors(self, layout: StateLayout, block_size: int) -> Tensors:
        if self.inverse is not None:
            numel = -(-self.on_host // block_size) * layout.per_block_width(block_size)
            yield "inverse", self.inverse, numel, (getattr(torch, layout.per_block[1]),)
