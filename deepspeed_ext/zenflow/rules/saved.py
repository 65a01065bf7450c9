"""What a checkpoint holds of a partition, by rule: read by pydantic into dataclasses, the runtime's
own where it has one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import ConfigDict

from deepspeed_ext.zenflow.rules.guard import PredictionErrors
from deepspeed_ext.zenflow.worker.kernel.adam_pass import ADAM_STATE
from deepspeed_ext.zenflow.worker.kernel.passes import StateLayout

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
AdamState = Sequence[torch.Tensor]
"""p and the moments: m, v. Only Adam collects gradients, so with Lion there is nothing to apply."""
Tensors = Iterator[tuple[str, torch.Tensor, int, Sequence[torch.dtype]]]
"""Saved tensors by name, each with what it must be: its elements, in one dimension, and dtypes."""


@dataclass(frozen=True, kw_only=True)
class PartitionValues:
    """A partition's saved state under the predictive rule.

    Attributes:
        numel: its number of elements.
        on_accelerator: how many of them, at its start, step on the accelerator; the other values
            leave them out.
        updates: its number of updates; None: the run's.
        last: constants of the newest gradient that was handed over.
        errors: errors of the newest probe, if the guard has not judged it yet.
        inverse: what the estimate needs (`OptimizerKind.known`).
    """

    __pydantic_config__ = ConfigDict(arbitrary_types_allowed=True)

    numel: int
    on_accelerator: int
    updates: int | None = None
    last: Any = None
    errors: PredictionErrors | None = None
    inverse: torch.Tensor | None = None

    @property
    def on_host(self) -> int:
        """How many elements the rule sees."""
        return self.numel - self.on_accelerator

    def tensors(self, layout: StateLayout, block_size: int) -> Tensors:
        """Every tensor with what it must be.

        Args:
            layout: the state of the optimizer that saved it.
        """
        if self.inverse is not None:
            numel = -(-self.on_host // block_size) * layout.per_block_width(block_size)
            yield "inverse", self.inverse, numel, (getattr(torch, layout.per_block[1]),)

    @property
    def is_behind(self) -> bool:
        """Whether p and the moments lack gradients that were collected."""
        return False

    def catch_up(
        self, state: AdamState, block_size: int, begin: int = 0, layout: StateLayout = ADAM_STATE
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
            self.apply_collected(parts, block_size, begin + skipped - self.on_accelerator, layout)

    def apply_collected(
        self, state: AdamState, block_size: int, begin: int, layout: StateLayout
    ) -> None:
        """`catch_up` for a part of what the rule sees, of which `begin` is an element, too."""
