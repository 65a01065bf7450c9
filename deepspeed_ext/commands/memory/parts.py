"""Defines the parts of a memory plan."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from deepspeed_ext.commands.memory.setup import Model, Ranks, Setup
from deepspeed_ext.zenflow.plan.held import Part, Phase

__all__ = ["Capacity", "MemoryPlan", "Place"]


class Place(enum.Enum):
    """Where memory is."""

    ACCELERATOR = "accelerator"
    HOST = "host"


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one run.

    Attributes:
        model, ranks, setup: what is planned.
        parts: memory of the job's first rank at the largest moment of a phase, by place and phase. Only this rank
            copies the module in a save.
        others: host bytes of every other rank, by phase.
        notes: facts that the plan does not know.
    """

    model: Model
    ranks: Ranks
    setup: Setup
    parts: Mapping[tuple[Place, Phase], tuple[Part, ...]]
    others: Mapping[Phase, int]
    notes: tuple[str, ...]

    def nbytes(self, place: Place, phase: Phase) -> int:
        """Maximum bytes of a rank within a phase."""
        return sum(part.nbytes for part in self.parts[place, phase])

    def peak(self, place: Place) -> int:
        """Maximum bytes of a rank over all phases."""
        return max(self.nbytes(place, phase) for phase in Phase)

    def page_locked(self, phase: Phase) -> int:
        """Page-locked bytes of a rank within a phase."""
        return sum(part.nbytes for part in self.parts[Place.HOST, phase] if part.page_locked)

    def on_host(self, phase: Phase) -> int:
        """Host bytes of all ranks of the first host within a phase."""
        return self.nbytes(Place.HOST, phase) + (self.ranks.per_host - 1) * self.others[phase]

    def host_peak(self) -> int:
        """Maximum host bytes of all ranks of the first host over all phases."""
        return max(self.on_host(phase) for phase in Phase)


@dataclass(frozen=True)
class Capacity:
    """Available memory: bytes of one accelerator and of one host; None: not known."""

    accelerator: int | None = None
    host: int | None = None

    def left(self, plan: MemoryPlan) -> dict[Place, int]:
        """Bytes that remain at the plan's peak, for each place with a known capacity; if negative, the plan does not
        fit."""
        given = {Place.ACCELERATOR: self.accelerator, Place.HOST: self.host}
        needed = {Place.ACCELERATOR: plan.peak(Place.ACCELERATOR), Place.HOST: plan.host_peak()}
        return {place: nbytes - needed[place] for place, nbytes in given.items() if nbytes is not None}
