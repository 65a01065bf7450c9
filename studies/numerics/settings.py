"""The settings of a training that belong neither to the task nor to the rule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

WARM_UP = 0.1
"""Share of the steps during which the cosine schedule warms up."""
INITIAL_LOSS_SCALE = 2.0**24
"""Of fp16; so large that the first steps overflow, which tests skipped steps too."""
GROWTH_STEPS = 100
"""Steps without overflow after which the loss scale doubles."""


@dataclass(frozen=True)
class Setting:
    """How a task is trained.

    Attributes:
        schedule: linear warm-up, then cosine to zero; or constant from the first step on.
        weights: dtype of the weights and gradients; masters and moments are fp32.
        compute: dtype of activations; "float32" computes in fp32 with weights that were rounded to
            `weights`, and rounds the gradients.
        clip: largest norm of the gradient; 0: no clipping.
        ranks: simulated ranks: shares of the batch, partitions, and a reduction in the dtype of the
            weights.
        batch: multiple of the task's batch.
    """

    steps: int = 400
    schedule: Literal["cosine", "constant"] = "cosine"
    beta2: float = 0.95
    weights: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    compute: Literal["float32", "weights"] = "float32"
    clip: float = 1.0
    ranks: int = 1
    batch: Fraction = Fraction(1)

    def lr(self, step: int, peak: float) -> float:
        """Learning rate of a step, from 1."""
        if self.schedule == "constant":
            return peak
        warm_up = max(1, round(WARM_UP * self.steps))
        if step <= warm_up:
            return peak * step / warm_up
        return peak * 0.5 * (1.0 + math.cos(math.pi * (step - warm_up) / (self.steps - warm_up)))


SETTINGS: dict[str, Setting] = {
    "base": Setting(),
    "constant": Setting(schedule="constant"),
    "beta2-0.999": Setting(beta2=0.999),
    "fp16": Setting(weights="float16"),
    "fp32": Setting(weights="float32"),
    "no-clip": Setting(clip=0.0),
    "ranks-2": Setting(ranks=2),
    "ranks-4": Setting(ranks=4),
    "batch-quarter": Setting(batch=Fraction(1, 4)),
    "batch-4x": Setting(batch=Fraction(4)),
    "steps-2000": Setting(steps=2000),
    "steps-100": Setting(steps=100),
}
