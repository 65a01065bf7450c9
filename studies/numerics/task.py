"""What a task is: a model, its batches, and what is held out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

Batch = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Injection:
    """Steps whose loss is spoiled: noise in place of data, and its loss multiplied."""

    every: int
    factor: float
    quiet_at_end: int = 60
    """Steps at the end without any, so that the last losses can be compared."""

    def hits(self, step: int, steps: int) -> bool:
        """Whether `step`, from 1, is spoiled."""
        return step % self.every == 0 and step <= steps - self.quiet_at_end


@dataclass(frozen=True)
class Task(ABC):
    """A model and its data. The forward pass of a model takes the tensors of a batch and returns
    its mean loss.

    Attributes:
        batch: examples per optimizer step, over all ranks.
        rates: learning rates of which AdamW chooses, on seed `SELECTION_SEED`.
        selection: setting under which it chooses.
        margin: what a gap is relative to: AdamW's loss, or its improvement over the start.
        limit: largest gap in percent that upholds the claim; None: that of the rule.
        injection: spoiled steps.
    """

    batch: int = 8
    rates: tuple[float, ...] = (5e-4, 1e-3, 2e-3)
    selection: str = "base"
    weight_decay: float = 0.1
    margin: Literal["loss", "improvement"] = "loss"
    limit: float | None = None
    injection: Injection | None = None

    @abstractmethod
    def model(self) -> nn.Module:
        """The model with initial weights, which depend on torch's default generator."""

    @abstractmethod
    def draw(self, generator: torch.Generator, examples: int) -> Batch:
        """A batch of training data."""

    @abstractmethod
    def held_out(self) -> list[Batch]:
        """Batches that are the same for every row."""

    def noise(self, batch: Batch, generator: torch.Generator) -> Batch:
        """What takes the place of `batch` in a spoiled step."""
        raise NotImplementedError(
            f"{type(self).__name__} has no noise: leave its `injection` at None"
        )

    def batch_of(self, seed: int, step: int, steps: int, examples: int) -> tuple[Batch, float]:
        """The batch of a step, from 1, and the factor of its loss. It depends on nothing else."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        batch = self.draw(generator, examples)
        if self.injection is not None and self.injection.hits(step, steps):
            return self.noise(batch, generator), self.injection.factor
        return batch, 1.0
