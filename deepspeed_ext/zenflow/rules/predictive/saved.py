"""Defines what a checkpoint holds of the predictive rule."""

from __future__ import annotations

import torch

from deepspeed_ext.zenflow.rules.predictive.guard import PredictionErrors
from deepspeed_ext.zenflow.rules.saved_values import (
    GRADIENT_DTYPES,
    AdamState,
    Count,
    LionStepValues,
    PartitionValues,
    SavedSchedule,
    SavedValues,
    StepValues,
    misfit,
)
from deepspeed_ext.zenflow.worker.kernel.reference import take_steps

__all__ = ["PredictivePartitionValues", "PredictiveSavedSchedule"]


class GuardValues(SavedValues):
    """A `GuardState` as plain values."""

    synchronous: bool
    trips: Count
    streak: Count
    steps_to_probe: Count
    probed: bool


class PredictiveSavedSchedule(SavedSchedule):
    """The state of a `PredictiveSchedule`."""

    is_ahead: bool
    guard: GuardValues
    is_exact: bool | None = None
    """None: not chosen yet."""


class ErrorValues(SavedValues):
    """`PredictionErrors` as plain values, possibly not finite."""

    prediction: float
    rounding: float
    update: float

    def make(self) -> PredictionErrors:
        """Build the `PredictionErrors`."""
        return PredictionErrors(**dict(self))


class PredictivePartitionValues(PartitionValues):
    """State of one partition.

    Attributes:
        last: constants of the newest gradient that was handed over.
        errors: errors of the newest probe, if the guard has not judged it yet.
        inverse: what the estimate remembers (`Estimate.kept`).
    """

    last: StepValues | LionStepValues | None
    errors: ErrorValues | None
    drift: torch.Tensor | None
    inverse: torch.Tensor | None

    def mistakes(self, blocks: int, steps: int) -> list[str]:
        found = (
            [misfit(self.drift, self.on_host, GRADIENT_DTYPES, "drift")]
            if self.drift is not None
            else []
        )
        if steps and self.last is None:
            found.append(f"no constants of the newest update after {steps} steps")
        if self.collected and (self.drift is None or self.inverse is None):
            found.append("collected gradients without drift and inverse")
        return super().mistakes(blocks, steps) + found

    def apply_collected(
        self, state: AdamState, block_size: int, begin: int = 0, moment_dtype: str = "float32"
    ) -> None:
        p, m, v = state
        gradients = [gradient[begin : begin + p.numel()] for gradient in self.gradients]
        first = self.on_accelerator + begin
        take_steps(p, m, v, gradients, self.steps, first, moment_dtype, block_size)
