"""Defines the measurements of a check's ranks. The ranks write them as JSON; `checks` reads them.
Pure."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

__all__ = [
    "Changed",
    "Death",
    "EndWeights",
    "Failure",
    "Found",
    "Movement",
    "Resumed",
    "Stage",
    "merge",
    "write",
]

Stage = Literal[
    "start", "plain", "initialize", "train", "save", "compare", "worker", "resume", "end"
]
"""The part of the check that a rank is in."""


@dataclass(frozen=True)
class Failure:
    """An exception on a rank.

    Attributes:
        stage: the part of the check in which it was raised.
        kinds: names of the exception's class and its base classes.
        text: the first lines of the exception's text.
    """

    stage: Stage
    kinds: tuple[str, ...]
    text: str

    @classmethod
    def of(cls, stage: Stage, error: BaseException) -> Failure:
        lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
        return cls(
            stage, tuple(kind.__name__ for kind in type(error).__mro__), " ".join(lines)[:600]
        )

    def __str__(self) -> str:
        return f"{self.kinds[0]}: {self.text}" if self.text else self.kinds[0]


@dataclass(frozen=True)
class Changed:
    """Number of elements that `initialize` changed, for each parameter that it changed."""

    elements: int
    parameters: int
    changed: dict[str, int] = field(default_factory=dict)

    def count(self) -> int:
        """All elements that changed."""
        return sum(self.changed.values())


@dataclass(frozen=True)
class Movement:
    """How one parameter moved from its initial value: lengths are L2 norms.

    Attributes:
        length: how far it moved in the run.
        plain: how far it moved in plain training; 0 without plain training.
        distance: distance between the two final values.
        noise: distance between two plain trainings with differently rounded gradients.
    """

    name: str
    numel: int
    length: float
    plain: float
    distance: float
    noise: float


@dataclass(frozen=True)
class EndWeights:
    """Errors in the weights after the last step.

    Attributes:
        astray: by parameter, number of elements that do not follow from the fp32 masters.
        still: parameters whose weights have their initial values, although their masters have
            moved.
        divided: parameters that differ between ranks.
    """

    astray: dict[str, int] = field(default_factory=dict)
    still: list[str] = field(default_factory=list)
    divided: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Resumed:
    """Differences after resuming: steps with other losses, and numbers of differing elements of the
    final weights and masters."""

    losses: dict[int, tuple[float, float]] = field(default_factory=dict)
    weights: int = 0
    masters: int = 0


@dataclass(frozen=True)
class Death:
    """Consequences of the death of an optimizer process: the error, and the seconds and steps until
    it was raised."""

    seconds: float
    steps: int
    error: Failure | None


@dataclass
class Found:
    """All measurements of one rank so far.

    Attributes:
        stage: the part of the check that it is in.
        norms: gradient norms, if the engine reports them.
        in_flight: number of steps by which the masters are behind, because gradients are in flight.
        noise: noise of the losses, as in `Movement`.
    """

    stage: Stage = "start"
    failure: Failure | None = None
    changed: Changed | None = None
    losses: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    untrained: list[float] = field(default_factory=list)
    noise: float = 0.0
    norms: list[float | None] = field(default_factory=list)
    plain_norms: list[float] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    plain_skipped: list[int] = field(default_factory=list)
    movements: list[Movement] = field(default_factory=list)
    in_flight: int = 0
    weights: EndWeights | None = None
    resumed: Resumed | None = None
    death: Death | None = None

    @classmethod
    def read(cls, path: Path) -> Found:
        """Read the file of `write`; return empty measurements if there is none."""
        return (
            TypeAdapter(cls).validate_python(json.loads(path.read_text()))
            if path.exists()
            else cls()
        )


def write(found: Found, path: Path) -> None:
    """Write the measurements so far; a reader sees a complete file at any time."""
    aside = path.with_suffix(".new")
    aside.write_text(json.dumps(asdict(found)))
    os.replace(aside, path)


def merge(ranks: list[Found]) -> Found:
    """Combine the measurements of all ranks: losses as means over ranks, otherwise the worst
    value."""
    first = ranks[0]

    def mean(name: str) -> list[float]:
        columns = zip(*(getattr(rank, name) for rank in ranks), strict=False)
        return [sum(values) / len(ranks) for values in columns]

    return Found(
        stage=first.stage,
        failure=next((rank.failure for rank in ranks if rank.failure), None),
        changed=max(
            (rank.changed for rank in ranks if rank.changed), key=Changed.count, default=None
        ),
        losses=mean("losses"),
        plain=mean("plain"),
        untrained=mean("untrained"),
        noise=max(rank.noise for rank in ranks),
        norms=first.norms,
        plain_norms=first.plain_norms,
        skipped=first.skipped,
        plain_skipped=first.plain_skipped,
        movements=first.movements,
        in_flight=first.in_flight,
        weights=_all_wrong_weights([rank.weights for rank in ranks]),
        resumed=_worst_resumed([rank.resumed for rank in ranks if rank.resumed]),
        death=_worst_death([rank.death for rank in ranks]),
    )


def _all_wrong_weights(ranks: list[EndWeights | None]) -> EndWeights | None:
    """None if any rank has not reported."""
    told = [rank for rank in ranks if rank is not None]
    if len(told) < len(ranks):
        return None
    astray = {
        name: max(rank.astray.get(name, 0) for rank in told)
        for rank in told
        for name in rank.astray
    }
    still, divided = (
        {name for rank in told for name in getattr(rank, each)} for each in ("still", "divided")
    )
    return EndWeights(astray, sorted(still), sorted(divided))


def _worst_resumed(ranks: list[Resumed]) -> Resumed | None:
    if not ranks:
        return None
    losses: dict[int, tuple[float, float]] = {}
    for rank in ranks:
        losses = {**rank.losses, **losses}
    return Resumed(losses, max(rank.weights for rank in ranks), max(rank.masters for rank in ranks))


def _worst_death(ranks: list[Death | None]) -> Death | None:
    """None if any rank has not reported; without an error if any rank had none."""
    if any(rank is None for rank in ranks):
        return None
    return max(
        (rank for rank in ranks if rank), key=lambda death: (death.error is None, death.seconds)
    )
