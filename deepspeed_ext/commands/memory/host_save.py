"""Computes what a save takes on the host of a rank, beside what is held between steps. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass

from deepspeed_ext.commands.memory.setup import FLOAT_BYTES, Model, Setup
from deepspeed_ext.flatten.plan import STAGING_CHUNK_BYTES
from deepspeed_ext.zenflow.plan.held import Held, Part
from deepspeed_ext.zenflow.plan.places import Copies, Place

__all__ = ["HostSave"]


@dataclass(frozen=True)
class HostSave:
    """A save of one rank.

    Attributes:
        model, setup: what is saved, and how it trains.
        held: what ZenFlow holds.
        numel: elements of all partitions.
        most: elements of the largest one.
        first: whether it is the first rank of the job, which writes the module.
    """

    model: Model
    setup: Setup
    held: Held | None
    numel: int
    most: int
    first: bool

    def moments(self) -> list[list[Part]]:
        """The first rank writes the module, then each rank its optimizer's state. DeepSpeed copies the module to the
        host first. ZenFlow shows what steps on the accelerator during all of it."""
        weight = self.model.itemsize
        has_module = self.first and not self.setup.partitions_weights
        module = Part("copy of the module", weight * self.model.params if has_module else 0)
        if self.setup.on_accelerator:  # copied tensor by tensor
            return [[module], [Part("copy of the state", FLOAT_BYTES * self.most)]]
        if self.setup.zenflow is None:
            return [[module]]
        assert self.held is not None
        moved = self.held.moved_by_selection()  # before anything is written
        state, counts = self.held.shown(), self.held.counts()
        if self.setup.zenflow.async_save:  # what is not in the arena is copied, until it is written
            return [[moved], [state, module, *self._copied(counts)]]
        largest_param = weight * self.model.largest if has_module else 0
        tensors = [state, counts, _chunk(self._most_saved()), self.held.decoded()]
        return [[moved], [state, _chunk(largest_param)], tensors]

    def _most_saved(self) -> int:
        """Bytes of the largest tensor of the accelerator in ZenFlow's state."""
        if self.setup.weights is Place.HOST or self.held is None:
            return 0
        computes_there = self.setup.copies in (Copies.INSIDE_STEP, Copies.BESIDE_STEP)
        saved = [nbytes for nbytes, _ in self.held.saved()] if computes_there else []
        return max([*saved, self.model.itemsize * self.most if self.setup.partitions_weights else 0])

    def _copied(self, counts: Part) -> list[Part]:
        """What is copied of ZenFlow's state for a save beside training."""
        assert self.held is not None
        saved = sum(nbytes * times for nbytes, times in self.held.saved())
        weights = self.model.itemsize * self.numel if self.setup.partitions_weights else 0
        return [Part(counts.kind, 2 * counts.nbytes + saved), Part("copy of the weights", weights)]


def _chunk(most: int) -> Part:
    """The chunk through which tensors of the accelerator are written, `most` bytes each."""
    return Part("staging", min(STAGING_CHUNK_BYTES, most), page_locked=True)
