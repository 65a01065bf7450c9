"""Defines the parts of a memory plan."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deepspeed_ext.commands.memory.setup import Model, Ranks, Setup

__all__ = ["Capacity", "MemoryPlan", "Part", "Phase", "Place", "largest"]


class Place(enum.Enum):
    """Where memory is."""

    ACCELERATOR = "accelerator"
    HOST = "host"


class Phase(enum.Enum):
    """A part of a run. Memory held between steps is also held in the three phases after it."""

    START = "start-up"
    BETWEEN = "between steps"
    BACKWARD = "forward and backward"
    STEP = "optimizer step"
    SAVE = "save"


@dataclass(frozen=True)
class Part:
    """Memory of one kind.

    Attributes:
        kind: the kind of its content.
        nbytes: bytes of one rank.
        page_locked: host memory that cannot be swapped and that the accelerator reaches directly.
    """

    kind: str
    nbytes: int
    page_locked: bool = False

    def __post_init__(self) -> None:
        assert self.nbytes >= 0, f"{self.kind}: {self.nbytes} bytes"


def largest(*moments: Sequence[Part]) -> tuple[Part, ...]:
    """The moment of a phase with the most bytes, without its empty parts."""
    return tuple(part for part in max(moments, key=_total) if part.nbytes)


def _total(parts: Sequence[Part]) -> int:
    return sum(part.nbytes for part in parts)


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
        return _total(self.parts[place, phase])

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
