"""Holds one rank's optimizer state: p and the moments of its partitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deepspeed_ext.zenflow.step.coded_moments import CodedMoments
from deepspeed_ext.zenflow.step.heads import Heads
from deepspeed_ext.zenflow.step.partition import Partition, WholeState

__all__ = ["OptimizerState"]


@dataclass(frozen=True)
class OptimizerState:
    """This rank's p and moments. Those on the accelerator, or coded, are shown in the arena on
    demand; codes on the accelerator are copied to the host first, and decoded there.

    Attributes:
        partitions: as the update rule steps them.
        wholes: the same partitions as DeepSpeed sees them.
        heads: steps the first elements of each partition on the accelerator; None: the rule steps
            all.
        coded: shows coded moments; None: moments are not coded.
    """

    partitions: Sequence[Partition]
    wholes: Sequence[WholeState]
    heads: Heads | None = None
    coded: CodedMoments | None = None

    def show(self) -> None:
        """Make the arena hold everything, moments as they are kept. It must not be in use."""
        if self.heads is not None:
            self.heads.show()

    def show_moments(self) -> None:
        """Make the arena, which holds everything, hold coded moments in fp32, too."""
        if self.coded is not None and not self.coded.is_shown:
            self.coded.show()

    def take(self) -> None:
        """Take back what others may have written where it was shown."""
        if self.coded is not None:
            self.coded.take()
        if self.heads is not None:
            self.heads.take()

    def hide(self) -> None:
        """Free the memory of what was shown and is no longer read."""
        if self.heads is not None:
            self.heads.hide()
        if self.coded is not None:
            self.coded.hide()

    def on_accelerator(self, index: int) -> list[torch.Tensor]:
        """What a partition keeps on the accelerator besides its weights and the rule's state."""
        return [] if self.heads is None else self.heads.tensors(index)
