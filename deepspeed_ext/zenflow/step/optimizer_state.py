"""Holds the state of the optimizer on one rank: p and the moments of its partitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deepspeed_ext.zenflow.step.accelerator_share import AcceleratorShare
from deepspeed_ext.zenflow.step.coded_moments import CodedMoments
from deepspeed_ext.zenflow.step.partition import Partition, WholeState

__all__ = ["OptimizerState"]


@dataclass(frozen=True)
class OptimizerState:
    """This rank's p and moments. Some of them are elsewhere, or coded, and are shown in the arena
    on demand.

    Attributes:
        partitions: as the update rule steps them.
        wholes: the same partitions as DeepSpeed sees them.
        share: steps the first elements of each on the accelerator; None: all of them are the
            rule's.
        coded: shows moments that are codes; None: they are none.
    """

    partitions: Sequence[Partition]
    wholes: Sequence[WholeState]
    share: AcceleratorShare | None = None
    coded: CodedMoments | None = None

    def show(self, *, moments: bool) -> None:
        """Let the arena hold everything; of coded moments only if `moments`. Nothing of it may be
        in use."""
        if self.share is not None:
            self.share.show()
        if self.coded is not None and moments:
            self.coded.show()

    def take(self) -> None:
        """Take what others may have written where it was shown."""
        if self.share is not None:
            self.share.take()
        if self.coded is not None:
            self.coded.take()

    def hide(self) -> None:
        """Free the memory of what was shown, which nobody reads any more."""
        if self.share is not None:
            self.share.hide()
        if self.coded is not None:
            self.coded.hide()

    def on_accelerator(self, index: int) -> list[torch.Tensor]:
        """What a partition keeps there besides its weights and what the rule keeps."""
        return [] if self.share is None else self.share.tensors(index)
