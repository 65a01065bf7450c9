"""Names the phases of a run and the kinds of memory, and finds a phase's peak."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from deepspeed_ext.zenflow.plan.places import Place

__all__ = ["Holder", "Memory", "Moments", "Part", "Phase", "largest", "nbytes_of", "parts_within"]


class Phase(enum.Enum):
    """A part of a run."""

    START = "start-up"
    """From a built module to the end of ``deepspeed.initialize``."""
    BETWEEN = "between steps"
    """What is held all the time."""
    BACKWARD = "forward and backward"
    STEP = "optimizer step"
    SAVE = "save"
    """Of a checkpoint, and of the model alone."""

    @property
    def keeps(self) -> bool:
        """Whether what is held between steps is also held during it."""
        return self is not Phase.START


class Memory(enum.Enum):
    """A kind of memory."""

    ACCELERATOR = "accelerator"
    PAGEABLE = "host, pageable"
    PAGE_LOCKED = "host, page-locked"
    """It cannot be swapped, and the accelerator reaches it directly."""
    ARENA = "host, arena"
    """Shared by a rank and its optimizer process, in /dev/shm."""
    LOCKED_ARENA = "host, arena, page-locked"

    @property
    def place(self) -> Place:
        """Where it is."""
        return Place.ACCELERATOR if self is Memory.ACCELERATOR else Place.HOST

    @property
    def is_page_locked(self) -> bool:
        return self in (Memory.PAGE_LOCKED, Memory.LOCKED_ARENA)

    @property
    def is_in_arena(self) -> bool:
        return self in (Memory.ARENA, Memory.LOCKED_ARENA)


@dataclass(frozen=True)
class Part:
    """Memory of one kind.

    Attributes:
        kind: what it contains.
        nbytes: bytes of one rank.
        memory: where they are.
    """

    kind: str
    nbytes: int
    memory: Memory

    def __post_init__(self) -> None:
        assert self.nbytes >= 0, f"{self.kind}: {self.nbytes} bytes"


Moments = Mapping[str, Sequence[Part]]
"""By name, what is held at moments of one phase. Equal names mean the same moment."""


class Holder(Protocol):
    """Holds memory during a run: ZenFlow, or DeepSpeed around it."""

    def held(self, place: Place) -> Sequence[Part]:
        """What it holds between steps."""

    def moments(self, place: Place, phase: Phase) -> Moments:
        """What it holds in addition or, if the phase does not keep `held`, instead."""


def parts_within(holders: Sequence[Holder], place: Place, phase: Phase) -> tuple[Part, ...]:
    """What `holders` hold together at a phase's peak, without empty parts."""
    held = [part for holder in holders for part in holder.held(place)] if phase.keeps else []
    found = [holder.moments(place, phase) for holder in holders]
    names = dict.fromkeys(chain(*found)) or [""]
    return largest(*([*held, *chain(*(each.get(name, ()) for each in found))] for name in names))


def largest(*moments: Sequence[Part]) -> tuple[Part, ...]:
    """The moment with the most bytes, without empty parts; those of one kind and memory are one."""
    found: dict[tuple[str, Memory], int] = {}
    for part in max(moments, key=nbytes_of):
        if part.nbytes:
            key = part.kind, part.memory
            found[key] = found.get(key, 0) + part.nbytes
    return tuple(Part(kind, nbytes, memory) for (kind, memory), nbytes in found.items())


def nbytes_of(parts: Sequence[Part]) -> int:
    return sum(part.nbytes for part in parts)
