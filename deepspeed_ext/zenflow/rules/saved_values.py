"""Defines what the saved states of both rules share: strict pydantic models of plain values and
tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeInt

from deepspeed_ext.zenflow.worker.kernel import AdamStep, LionStep
from deepspeed_ext.zenflow.worker.kernel.adam_pass import dtype_name

__all__ = [
    "GRADIENT_DTYPES",
    "AdamState",
    "Count",
    "LionStepValues",
    "PartitionValues",
    "Positive",
    "SavedSchedule",
    "SavedValues",
    "StepValues",
    "misfit",
]

GRADIENT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Count = Annotated[NonNegativeInt, Field(lt=1 << 62)]
Positive = Annotated[int, Field(ge=1, lt=1 << 62)]
AdamState = Sequence[torch.Tensor]
"""p and the moments: m, v. Only Adam collects gradients, so with Lion there is nothing to apply."""
Fraction = Annotated[FiniteFloat, Field(ge=0, lt=1)]


class SavedValues(BaseModel):
    """A part of the saved state. Unknown keys and values of other types are errors."""

    model_config = ConfigDict(
        extra="forbid", strict=True, arbitrary_types_allowed=True, frozen=True
    )


class StepValues(SavedValues):
    """An `AdamStep` as plain values."""

    lr: FiniteFloat
    beta1: Fraction
    beta2: Fraction
    eps: FiniteFloat
    weight_decay: FiniteFloat
    decoupled: bool
    step: Positive
    grad_scale: FiniteFloat
    bias_correction: bool = True

    def make(self) -> AdamStep:
        """Build the `AdamStep`."""
        return AdamStep(**dict(self))


class LionStepValues(SavedValues):
    """A `LionStep` as plain values."""

    lr: FiniteFloat
    beta1: Fraction
    beta2: Fraction
    weight_decay: FiniteFloat
    step: Positive
    grad_scale: FiniteFloat

    def make(self) -> LionStep:
        """Build the `LionStep`."""
        return LionStep(**dict(self))


class SavedSchedule(SavedValues):
    """The state of a schedule."""

    steps: Count
    interval: Positive | None


class PartitionValues(SavedValues, ABC):
    """The part of a partition's saved state that both rules have.

    Attributes:
        numel: its number of elements.
        on_accelerator: how many of them, at its start, step on the accelerator; the other values
            leave them out.
        updates: its number of updates; None: the run's.
    """

    numel: Count
    on_accelerator: Count
    updates: Count | None = None
    collected: list[StepValues]
    gradients: list[torch.Tensor]

    @property
    def on_host(self) -> int:
        """How many elements the rule sees."""
        return self.numel - self.on_accelerator

    @property
    def steps(self) -> list[AdamStep]:
        """Constants of the collected gradients, oldest first."""
        return [step.make() for step in self.collected]

    def mistakes(self, blocks: int, steps: int) -> list[str]:
        """Describe every inconsistency.

        Args:
            blocks: number of blocks that the rule sees.

        Returns:
            Messages, with empty strings among them for checks that passed.
        """
        found = [
            misfit(grad, self.on_host, GRADIENT_DTYPES, f"gradient {i}")
            for i, grad in enumerate(self.gradients)
        ]
        if len(self.gradients) != len(self.collected):
            found.append(
                f"{len(self.gradients)} gradients with the constants of {len(self.collected)}"
            )
        return found

    @abstractmethod
    def apply_collected(
        self, state: AdamState, block_size: int, begin: int = 0, moment_dtype: str = "float32"
    ) -> None:
        """Apply the collected gradients to a part of what the rule sees, as the rule would, in this
        process.

        Args:
            state: p, m, v of the part, changed in place; 1-D [n], host; p is fp32.
            begin: first element of the part, not counting those on the accelerator, at the start of
                a block. The part ends where a block or the partition ends.
            moment_dtype: dtype that the rule rounded the moments to.
        """

    def catch_up(
        self, state: AdamState, block_size: int, begin: int = 0, moment_dtype: str = "float32"
    ) -> None:
        """`apply_collected` for a part that begins at element `begin` of the whole partition, where
        a block begins."""
        skipped = max(0, self.on_accelerator - begin)
        parts, begin = [array[skipped:] for array in state], begin + skipped - self.on_accelerator
        self.apply_collected(parts, block_size, begin, moment_dtype)


def misfit(tensor: torch.Tensor, numel: int, dtypes: Sequence[torch.dtype], what: str) -> str:
    """Return why `tensor` is not a 1-D strided CPU tensor of `numel` elements in one of `dtypes`;
    empty if it is."""
    plain = tensor.device.type == "cpu" and tensor.layout == torch.strided
    if plain and tuple(tensor.shape) == (numel,) and tensor.dtype in dtypes:
        return ""
    names = " or ".join(map(dtype_name, dtypes))
    return (
        f"{what} is {tuple(tensor.shape)} {tensor.dtype} {tensor.layout} on {tensor.device}, "
        f"expected ({numel},) {names} strided on the CPU"
    )
