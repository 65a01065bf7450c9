"""Which faults come when: a pure function of the seed."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass

__all__ = ["FORMS", "Fault", "Kind", "Round", "plan_round"]

FORMS = (
    "8-bit moments",
    "on the host",
    "half on the host",
    "Lion",
    "plain",
    "bf16 moments",
    "selective",
)
"""What is trained, by name (`trainer.settings_of`), in the order in which a stage takes them."""


class Kind(str, enum.Enum):
    """What is done to the run."""

    KILL_WORKER = "kill a worker"
    KILL_RANK = "kill a rank"
    KILL_ALL = "kill all ranks"
    KILL_IN_SAVE = "kill a rank in a save"
    STOP_WORKER = "stop a worker"
    INTERRUPT = "interrupt all ranks"
    TERMINATE = "terminate all ranks"
    SUSPEND = "suspend all processes"
    DISK_FULL = "disk full"
    TRUNCATE = "truncate newest"
    DROP_ENGINE = "drop the engine"

    @property
    def ends_ranks(self) -> bool:
        """Whether the ranks must end; after the other kinds the same processes train on."""
        return self not in (Kind.SUSPEND, Kind.DISK_FULL, Kind.DROP_ENGINE)

    @property
    def touches_checkpoints(self) -> bool:
        """Whether it needs checkpoints, and what it did to them shows when they are read and
        written again."""
        return self in (Kind.KILL_IN_SAVE, Kind.TRUNCATE, Kind.DROP_ENGINE, Kind.DISK_FULL)


@dataclass(frozen=True)
class Fault:
    """One fault: what, on which rank, and when."""

    kind: Kind
    rank: int
    starting: bool
    """Whether `delay_seconds` counts from the launch of the ranks, else from the first step after
    it."""
    delay_seconds: float
    moment: float
    """In [0, 1): where in a save a rank is killed."""


@dataclass(frozen=True)
class Round:
    """One training run from its first step on, and its faults in order."""

    number: int
    stage: int
    ranks: int
    form: str
    """One of `FORMS`."""
    faults: tuple[Fault, ...]


_STARTING_FRACTION = 0.25
_START_SECONDS = 5.0


def plan_round(seed: int, number: int, longest_delay_seconds: float) -> Round:
    """Round `number` (from 0): every kind once, in random order, on random ranks, at random times.

    Stages and numbers of ranks take turns: six rounds see each combination. Each
    stage sees another form with each of its rounds, from one on that the seed chooses.
    """
    draw = random.Random(seed * 1_000_003 + number)
    kinds = list(Kind)
    draw.shuffle(kinds)
    ranks = (2, 3)[number % 2]
    faults: list[Fault] = []
    for kind in kinds:
        # The first step after some faults is awaited, because only it shows what they did.
        can_start = not kind.touches_checkpoints and not (
            faults and faults[-1].kind.touches_checkpoints
        )
        starting = draw.random() < _STARTING_FRACTION and can_start
        delay = draw.uniform(0.0, _START_SECONDS if starting else longest_delay_seconds)
        faults.append(Fault(kind, draw.randrange(ranks), starting, delay, draw.random()))
    form = FORMS[(number // 3 + seed) % len(FORMS)]
    return Round(number, 1 + (number + 1) % 3, ranks, form, tuple(faults))
