"""Logs, at most once a minute, what limits a run's steps and what would help."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from deepspeed_ext.runtime.log import logger
from deepspeed_ext.zenflow.plan.advice import NOT_WORTH, Advice, Cores, MeasuredStep, Remedy, advise

__all__ = ["Adviser"]

SECONDS_BETWEEN = 60.0
FEWEST_STEPS = 5
"""Overlapped steps to measure before the first judgement."""


class Adviser:
    """Judges typical steps of this rank.

    Args:
        remedies: what may be suggested.
        cores: cores of the optimizer process; None: not known.
        leads: whether this rank logs. Its times stand for all, because they include waits for other
            ranks.
        room: returns the bytes of accelerator memory that have never been used.
        clock: returns seconds.
    """

    def __init__(
        self,
        remedies: Sequence[Remedy],
        cores: Cores | None,
        *,
        leads: bool,
        room: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._remedies = remedies
        self._cores = cores
        self._leads = leads
        self._room = room
        self._clock = clock
        self._due = clock()
        self._newest: Advice | None = None
        self._said: Advice | None = None

    def settle(self, remedies: Sequence[Remedy], *, is_another: bool) -> None:
        """Suggest only these from now on, because the plan has been chosen. If it `is_another`, the
        newest judgement is no longer true."""
        self._remedies = remedies
        if is_another:
            self._newest = None

    def is_due(self, steps: int) -> bool:
        """Whether to judge now, if `steps` overlapped steps have been measured."""
        return steps >= FEWEST_STEPS and self._clock() >= self._due

    def judge(self, step: MeasuredStep | None) -> None:
        """Judge a typical step, and log what is new; None: do nothing."""
        if step is None:
            return
        self._due = self._clock() + SECONDS_BETWEEN
        self._newest = advice = advise(step, self._remedies, self._cores, self._room())
        if self._leads and _is_news(advice, self._said):
            self._said = advice
            logger.info(advice.line)

    def measurements(self) -> dict[str, float]:
        """The newest judgement by name; empty before the first."""
        if self._newest is None:
            return {}
        found = {"slowdown": self._newest.slowdown, "limit": float(self._newest.limit)}
        helped = self._newest.helped
        return found if helped is None else {**found, "helped_slowdown": helped}


def _is_news(now: Advice, said: Advice | None) -> bool:
    if said is None or now.limit is not said.limit or (now.helped is None) != (said.helped is None):
        return True
    return abs(now.slowdown - said.slowdown) >= NOT_WORTH
