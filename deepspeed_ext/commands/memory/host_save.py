"""Computes what a save takes on the host of a rank, beside what is held between steps. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deepspeed_ext.commands.memory.parts import Part
from deepspeed_ext.commands.memory.rules import bytes_of
from deepspeed_ext.commands.memory.setup import FLOAT_BYTES, Model, Run, Setup
from deepspeed_ext.flatten.plan import STAGING_CHUNK_BYTES
from deepspeed_ext.zenflow.plan.chunks import CODED_CHUNK_NUMEL, chunk_of
from deepspeed_ext.zenflow.plan.places import Copies, Place

__all__ = ["HostSave"]

_DECODING_BYTES = 16
"""Of an element that is decoded: its value, two temporaries of fp32, and a value of the chunk before."""


@dataclass(frozen=True)
class HostSave:
    """A save of one rank.

    Attributes:
        model, setup: what is saved, and how it trains.
        on_host: the partitions without what steps on the accelerator.
        numel: elements of all partitions.
        most: elements of the largest one.
        first: whether it is the first rank of the job, which writes the module.
    """

    model: Model
    setup: Setup
    on_host: Sequence[Run]
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
        moved = Part("temporaries", bytes_of(self.setup.rule, self.most, weight).moved)  # before anything is written
        shown = self.numel - sum(run.numel * run.times for run in self.on_host)
        state = Part("shown state", len(self.setup.layout.kinds) * FLOAT_BYTES * shown)
        if self.setup.zenflow.async_save:  # what is not in the arena is copied, until it is written
            return [[moved], [state, module, *self._copied()]]
        largest_param = weight * self.model.largest if has_module else 0
        decoded = Part("moments on their way", _DECODING_BYTES * self._decoded_numel())
        return [[moved], [state, _chunk(largest_param)], [state, self._counts(), _chunk(self._most_saved()), decoded]]

    def _decoded_numel(self) -> int:
        """Elements of a moment that are decoded at once; 0: moments are no codes."""
        rule = self.setup.rule
        return min(chunk_of(CODED_CHUNK_NUMEL, rule.block_size), self.most) if rule.layout.is_coded else 0

    def _counts(self) -> Part:
        """What every save copies of the rule's state."""
        copied = sum(bytes_of(self.setup.rule, run.numel).copied * run.times for run in self.on_host)
        return Part("copy of the rule's state", copied)

    def _most_saved(self) -> int:
        """Bytes of the largest tensor of the accelerator in ZenFlow's state."""
        if self.setup.weights is Place.HOST:
            return 0
        computes_there = self.setup.copies in (Copies.INSIDE_STEP, Copies.BESIDE_STEP)
        weight, runs = self.model.itemsize, self.on_host if computes_there else ()
        saved = [size for run in runs for size in bytes_of(self.setup.rule, run.numel, weight).saved]
        return max([*saved, weight * self.most if self.setup.partitions_weights else 0])

    def _copied(self) -> list[Part]:
        """What is copied of ZenFlow's state for a save beside training."""
        weight, counts = self.model.itemsize, self._counts()
        saved = sum(sum(bytes_of(self.setup.rule, run.numel, weight).saved) * run.times for run in self.on_host)
        weights = weight * self.numel if self.setup.partitions_weights else 0
        return [Part(counts.kind, 2 * counts.nbytes + saved), Part("copy of the weights", weights)]


def _chunk(most: int) -> Part:
    """The chunk through which tensors of the accelerator are written, `most` bytes each."""
    return Part("staging", min(STAGING_CHUNK_BYTES, most), page_locked=True)
