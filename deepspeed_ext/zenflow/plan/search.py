"""Searches the plans that have the same numerics for the fastest one that fits.

Called twice. Before the first step, `decide` passes the places where gradients and y may live, with
times computed from bytes. After measured steps, `zenflow.tuner` passes what the run may still move
to, with every rank's times. It is pure, so all ranks find the same plan.

Changes that affect numerics are not searched: `advice` suggests them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deepspeed_ext.zenflow.plan.lanes import Speeds, lanes_of
from deepspeed_ext.zenflow.plan.places import Copies
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from deepspeed_ext.zenflow.plan.share import (
    HIDDEN,
    UNITS,
    ChainTimes,
    fitting_units,
    hiding_units,
    step_seconds,
    with_copies_inside,
)

__all__ = [
    "LEAST_GAINED",
    "TYPICAL",
    "Found",
    "Measured",
    "Option",
    "expected_times",
    "search",
    "search_measured",
    "ways_on",
]

LEAST_GAINED = 0.03
"""Fraction by which a later option must shorten a step, because it gives something up."""

TYPICAL = Speeds(link=20e9, host=100e9)
"""Assumed for a rank with an accelerator until something is measured. Only their ratio matters."""


@dataclass(frozen=True)
class Option:
    """Plans that differ only in the share of the optimizer on the host.

    Attributes:
        plan: one of them.
        least: the smallest share on the host for which every rank has room.
        most: the largest share.
        times: each rank's, with all elements on the host.
    """

    plan: ZenFlowPlan
    least: float
    most: float
    times: tuple[ChainTimes, ...]


@dataclass(frozen=True)
class Found:
    """The best of an option.

    Attributes:
        plan: the option's.
        share: fraction of each partition on the host.
        seconds: predicted step time on the slowest rank.
    """

    plan: ZenFlowPlan
    share: float
    seconds: float


def search(options: Sequence[Option]) -> Found:
    """The option with the shortest step. An earlier one is preferred unless a later one gains
    `LEAST_GAINED`. Of an option, the largest share that hides comes first, because it moves least,
    and the smallest one last: a pass that delays the accelerator costs by every element.

    Args:
        options: at least one, those that give up least first.
    """
    best, *others = (found for option in options for found in _ends_of(option))
    for each in others:
        if each.seconds < (1.0 - LEAST_GAINED) * best.seconds:
            best = each
    return best


def _ends_of(option: Option) -> Iterator[Found]:
    plan, times = option.plan, option.times
    hiding = min(hiding_units(plan, each) for each in times) / UNITS
    for share in dict.fromkeys((min(option.most, max(option.least, hiding)), option.least)):
        yield Found(plan, share, max(step_seconds(plan, share, each) for each in times))


def expected_times(plans: Sequence[ZenFlowPlan]) -> list[ChainTimes]:
    """For each plan, times from the bytes that it moves. The accelerator's step, unknown so far, is
    assumed to be just long enough to hide the slowest plan."""
    found = [lanes_of(plan, TYPICAL) for plan in plans]
    device = max((each.beside for each in found), default=0.0) / HIDDEN
    return [
        ChainTimes(device, lanes.host, max(lanes.down, lanes.up))
        if plan.copies is Copies.BESIDE_STEP
        else ChainTimes(device, lanes.beside, lanes.exposed)
        for plan, lanes in zip(plans, found, strict=True)
    ]


@dataclass(frozen=True)
class Measured:
    """One rank's measurements, from which all ranks of the model choose one plan.

    Attributes:
        times: with all elements on the host.
        least: for each of `ways_on`, how much must step on the host, of `UNITS`, because the
            accelerator has no room for the rest.
        changes_threads: whether its optimizer process changes its number of threads.
    """

    times: ChainTimes
    least: tuple[int, ...]
    changes_threads: bool = False

    @classmethod
    def of(
        cls,
        now: ZenFlowPlan,
        times: ChainTimes,
        room: int,
        changes_threads: bool = False,
    ) -> Measured:
        """Derive it from `room` bytes of the accelerator above the peak of a step."""
        ways = ways_on(now)
        least = tuple(fitting_units(plan, room, now) for plan in ways)
        return cls(times, least, changes_threads)


def ways_on(now: ZenFlowPlan) -> list[ZenFlowPlan]:
    """The plans that a run with the plan `now` may move to, each with any share on the host up to
    now's: landing buffers may give way to a larger share on the accelerator."""
    if now.copies is Copies.BESIDE_STEP and now.rule.overlapped:
        return [now, with_copies_inside(now)]
    return [now]


def search_measured(now: ZenFlowPlan, ranks: Sequence[Measured]) -> Found:
    """The best plan to move to, from what every rank has measured."""
    times = tuple(each.times for each in ranks)
    ways = ways_on(now)
    if any(each.link <= 0.0 for each in times):  # the time of exposed copies is unknown
        ways = ways[:1]
    options = []
    for index, plan in enumerate(ways):
        least = max(each.least[index] for each in ranks) / UNITS
        options.append(Option(plan, min(least, now.host_share), now.host_share, times))
    return search(options)
