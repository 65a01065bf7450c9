"""Controls the simulated accelerator: the order of its tasks, its limits, what it found, and its
model of time."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from tests.support.simulated_accelerator.device import library

__all__ = [
    "Order",
    "Race",
    "Span",
    "configure",
    "decisions",
    "found_races",
    "idle_share",
    "recent_tasks",
    "timeline",
]

Order = Literal["eager", "held", "seeded", "replay"]


@dataclass(frozen=True)
class Race:
    """Two tasks that touch the same bytes, one of them writing, with no order between them.

    Attributes:
        text: both tasks, the bytes, and where each was launched.
        earlier: the task that was launched first.
        later: the other.
        trace: all tasks that touched these bytes, in the order of their launch.
    """

    text: str
    earlier: str
    later: str
    trace: tuple[str, ...]


def configure(
    order: Order = "held", seed: int = 0, decisions: Sequence[tuple[int, int]] = ()
) -> None:
    """Choose the order in which tasks run from now on.

    Args:
        order: ``eager``: as soon as they may; ``held``: only when the host waits for them;
            ``seeded``: any legal order, drawn from `seed`; ``replay``: `decisions`, which an
                earlier run of the same program has made.
        seed: of a seeded order.
        decisions: of `decisions()`.
    """
    library.configure(order, seed, list(decisions))


def decisions() -> list[tuple[int, int]]:
    """Return what ran when since `configure`: (number of the host's call, turn of the stream) for
    each task."""
    return library.decisions()


def recent_tasks() -> list[str]:
    """Return the last tasks that ran, with the place of their launch."""
    return library.recent_tasks()


def found_races() -> list[Race]:
    """Return the races found since the last call, and forget them."""
    races = [
        Race(race["text"], race["earlier"], race["later"], tuple(race["trace"]))
        for race in library.races()
    ]
    library.forget_races()
    return races


@dataclass(frozen=True)
class Span:
    """Something that took time on a lane of the model: compute, copy down, copy up, communication,
    host waits, ..."""

    name: str
    lane: str
    device: int
    stream: int
    begin_us: float
    end_us: float


@contextmanager
def timeline(**speeds: float) -> Iterator[list[Span]]:
    """Model the time of what runs inside. The list is filled when the block ends.

    Args:
        speeds: fields of `Speeds` in csrc/timeline.h, such as ``link_gb_per_s=25``.
    """
    given = library.Speeds()
    for name, value in speeds.items():
        setattr(given, name, value)
    spans: list[Span] = []
    library.start_timeline(given)
    try:
        yield spans
    finally:
        spans += [Span(*span) for span in library.stop_timeline()]


def idle_share(spans: Sequence[Span], lane: str = "compute") -> float:
    """Return the share of the time from the first to the last span in which nothing runs on
    `lane`."""
    begin, end = min(span.begin_us for span in spans), max(span.end_us for span in spans)
    return 1 - sum(until - since for since, until in _busy(spans, {lane})) / (end - begin)


def _busy(spans: Sequence[Span], lanes: Collection[str]) -> list[tuple[float, float]]:
    """When something runs on any of `lanes`: periods without overlap, in order."""
    periods: list[tuple[float, float]] = []
    for begin, end in sorted((span.begin_us, span.end_us) for span in spans if span.lane in lanes):
        if periods and begin <= periods[-1][1]:
            begin, end = periods[-1][0], max(end, periods.pop()[1])
        periods.append((begin, end))
    return periods


def _configure_from_environment() -> None:
    """``SIMULATED_ORDER``: ``held``, ``eager`` or the number of a seed."""
    order = os.environ.get("SIMULATED_ORDER", "held")
    if order.isdecimal():
        configure("seeded", int(order))
    else:
        configure(order)  # type: ignore[arg-type]


_configure_from_environment()
