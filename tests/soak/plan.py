"""Which faults come when: a pure function of the seed."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass

__all__ = ["FAULTS_PER_ROUND", "RANKS", "Fault", "Kind", "Round", "plan_round"]

RANKS = 2


class Kind(str, enum.Enum):
    """What is done to the run."""

    KILL_WORKER = "kill a worker"
    KILL_RANK = "kill a rank"
    KILL_ALL = "kill all ranks"
    STOP_WORKER = "stop a worker"
    INTERRUPT = "interrupt"
    DISK_FULL = "disk full"
    TRUNCATE = "truncate newest"


@dataclass(frozen=True)
class Fault:
    """One fault: what, on which rank, and when."""

    kind: Kind
    rank: int
    starting: bool
    """Whether `delay_seconds` counts from the launch of the ranks, else from the first step after it."""
    delay_seconds: float


@dataclass(frozen=True)
class Round:
    """One training run from its first step on, and its faults in order."""

    number: int
    stage: int
    interval: int
    faults: tuple[Fault, ...]


FAULTS_PER_ROUND = len(Kind)
_STARTING_FRACTION = 0.25
_START_SECONDS = 5.0


def plan_round(seed: int, number: int, longest_delay_seconds: float) -> Round:
    """Round `number` (from 0): every kind once, in random order, on random ranks, at random times.

    Stages and intervals take turns, so that six rounds see each pair.
    """
    draw = random.Random(seed * 1_000_003 + number)
    kinds = list(Kind)
    draw.shuffle(kinds)
    faults = tuple(_fault(draw, kind, longest_delay_seconds) for kind in kinds)
    return Round(number, 1 + (number + 1) % 3, (4, 1)[number % 2], faults)


def _fault(draw: random.Random, kind: Kind, longest_delay_seconds: float) -> Fault:
    needs_training = kind in (Kind.DISK_FULL, Kind.TRUNCATE)
    starting = not needs_training and draw.random() < _STARTING_FRACTION
    delay = draw.uniform(0.0, _START_SECONDS if starting else longest_delay_seconds)
    return Fault(kind, draw.randrange(RANKS), starting, delay)
