"""What a checkpoint holds of a partition, whatever the rule: read by pydantic into dataclasses, the
runtime's own where it has one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from pydantic import ConfigDict

from deepspeed_ext.zenflow.worker.kernel import AdamStep
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE
from deepspeed_ext.zenflow.worker.kernel.moments import step_in_fp32
from deepspeed_ext.zenflow.worker.kernel.passes import StateLayout

__all__ = ["FLOATS", "AdamState", "PartitionValues", "Shape"]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
AdamState = Sequence[torch.Tensor]
"""p and the moments: m, v. Only Adam collects gradients, so with Lion there is nothing to apply."""


class Shape(NamedTuple):
    """A saved tensor, its name, and what the run needs: the elements of a 1-D tensor and its
    dtypes."""

    name: str
    tensor: torch.Tensor
    numel: int
    dtypes: Sequence[torch.dtype]

    @property
    def fits(self) -> bool:
        found = self.tensor
        return tuple(found.shape) == (self.numel,) and found.dtype in self.dtypes


@dataclass(frozen=True, kw_only=True)
class PartitionValues:
    """The part of a partition's saved state that both rules have.

    Attributes:
        numel: its number of elements.
        on_accelerator: how many of them, at its start, step on the accelerator; the other values
            leave them out.
        updates: its number of updates; None: the run's.
        collected: constants of the gradients that were not handed over, oldest first; only in
            checkpoints of earlier releases.
        gradients: these gradients.
    """

    __pydantic_config__ = ConfigDict(arbitrary_types_allowed=True)

    numel: int
    on_accelerator: int
    updates: int | None = None
    collected: list[AdamStep] = field(default_factory=list)
    gradients: list[torch.Tensor] = field(default_factory=list)

    @property
    def on_host(self) -> int:
        """How many elements the rule sees."""
        return self.numel - self.on_accelerator

    def shapes(self, layout: StateLayout, block_size: int) -> Iterator[Shape]:
        """Yield every tensor with what it must be.

        Args:
            layout: the state of the optimizer that saved it.
            block_size: elements of a block.
        """
        for index, gradient in enumerate(self.gradients):
            yield Shape(f"gradient {index}", gradient, self.on_host, FLOATS)

    @property
    def is_behind(self) -> bool:
        """Whether p and the moments lack gradients that were collected."""
        return bool(self.collected)

    def catch_up(
        self,
        state: AdamState,
        block_size: int,
        begin: int = 0,
        layout: StateLayout = ADAM_STATE,
    ) -> None:
        """Apply the collected gradients to a part of the partition, as the rule would, in this
        process.

        Args:
            state: p, m, v of the part, changed in place; 1-D [n], host; p is fp32.
            begin: first element of the part, at the start of a block. The part ends where a block
                or the partition ends.
            layout: the optimizer's state, whose moments the rule rounded.
        """
        skipped = max(0, self.on_accelerator - begin)
        parts = [array[skipped:] for array in state]
        if self.is_behind and parts[0].numel():
            begin += skipped - self.on_accelerator
            self.apply_collected(parts, block_size, begin, layout)

    def apply_collected(
        self, state: AdamState, block_size: int, begin: int, layout: StateLayout
    ) -> None:
        """`catch_up` for a part of what the rule sees, of which `begin` is an element, too."""
        first, end = self.on_accelerator + begin, begin + state[0].numel()
        for gradient, step in zip(self.gradients, self.collected, strict=True):
            step_in_fp32(layout, state, gradient[begin:end], step, block_size, first)
