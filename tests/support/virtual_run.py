"""Runs the choice of a plan on a machine of virtual time: real decisions, and steps that only count
seconds."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.runtime import memory
from deepspeed_ext.zenflow.plan.decide import decide
from deepspeed_ext.zenflow.plan.facts import Caller, RankFacts, Run, ZenFlowFacts
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from deepspeed_ext.zenflow.plan.times import ChainTimes, MeasuredStep, thread_counts
from deepspeed_ext.zenflow.rules.predictive import PredictiveSchedule
from deepspeed_ext.zenflow.step import first_steps
from deepspeed_ext.zenflow.worker.messages import ThreadLimit

__all__ = ["THREADS", "WARM_UP", "Machine", "VirtualRun"]

NUMEL, TOTAL, THREADS, WARM_UP = 1 << 28, 80 << 30, 8, 10
EXACT_OVER_ESTIMATE = 28 / 6
"""Seconds of a step of elements on the accelerator over those of their estimate."""


@dataclass(frozen=True)
class Machine:
    """What decides how long steps take, at some time.

    Attributes:
        device: seconds of forward and backward.
        worker: of a pass over all elements with as many cores as threads.
        cores: of the optimizer process, at most `THREADS`; others run on the rest.
        slower: how many times as long the passes of the other ranks take.
        contention: by how much a second of a pass delays forward and backward.
        there: seconds of a step of all elements on the accelerator.
    """

    device: float = 1.0
    worker: float = 0.5
    cores: int = THREADS
    slower: tuple[float, ...] = ()
    contention: float = 0.0
    there: float = 0.0

    def passed(self, threads: int, share: float) -> float:
        """Seconds of a pass on equal parts, of which each core takes one after the other."""
        return self.worker * share * (THREADS / threads) * math.ceil(threads / self.cores)

    def beside(self, threads: int, share: float) -> float:
        """Seconds of forward and backward while a pass runs."""
        delayed = self.device + self.contention * self.passed(threads, share)
        return min(delayed, self.device / (1.0 - self.contention))

    def step(self, threads: int, share: float) -> float:
        """Seconds of an overlapped step, in which the slowest rank decides."""
        slowest = max((1.0, *self.slower)) * self.passed(threads, share)
        return max(self.beside(threads, share), slowest) + self.there * (1.0 - share)

    @property
    def best(self) -> float:
        """Seconds of the best step of an exhaustive sweep."""
        counts = range(1, THREADS + 1)
        return min(self.step(threads, share / 64) for threads in counts for share in range(65))


class _Ranks:
    """This rank, and others that measure the same but for slower passes."""

    rank = 0

    def __init__(self, slower: Sequence[float]) -> None:
        self._slower = slower

    def minimum(self, *values: int) -> tuple[int, ...]:
        return values

    def all(self, flag: bool) -> bool:
        return flag

    def gather_objects(self, mine: tuple[ChainTimes, int]) -> list[tuple[ChainTimes, int]]:
        times, units = mine
        slower = (replace(times, worker=times.worker * by) for by in self._slower)
        return [mine, *((each, units) for each in slower)]


def _move(host: Any, plan: ZenFlowPlan) -> bool:
    host.decided = plan
    return True


class VirtualRun:
    """One run: the real `FirstSteps` around steps of a `Machine`.

    Args:
        warm_up: synchronous steps at the start.
        room: fraction of the accelerator's memory that is free.

    Attributes:
        plans: after each step, share on the host and threads, as decided.
        metrics: what steps have measured.
    """

    def __init__(self, machine: Machine, *, warm_up: int = WARM_UP, room: float = 0.5) -> None:
        self.machine, self._room = machine, round(room * TOTAL)
        self.plans: list[tuple[float, int]] = []
        self._steps: list[tuple[float, float, float]] = []
        self._threads, self._waited = THREADS, True
        rank = RankFacts((Run(NUMEL),), TOTAL, TOTAL)
        facts = ZenFlowFacts((rank,), Caller("bfloat16", "bfloat16", takes_gradients=True))
        decided = decide(facts, ZenFlowConfig(), ratio=None)
        assert decided.measures_share
        self.schedule = PredictiveSchedule(True, warm_up)
        no_errors, process = contextlib.nullcontext, SimpleNamespace(submit=self._limit)
        self.host: Any = SimpleNamespace(
            decided=decided,
            ranks=_Ranks(machine.slower),
            link=SimpleNamespace(deferring_errors=no_errors, process=process),
            rule=SimpleNamespace(schedule=self.schedule),
            state=SimpleNamespace(expose=lambda **_: True),
        )
        self.metrics: Any = SimpleNamespace(
            typical_step=self._typical_step, begin_anew=self._steps.clear, newest={}
        )
        self.first_steps = first_steps.FirstSteps(
            self.metrics,
            ZenFlowConfig(),
            chooses_share=True,
            counts=thread_counts(THREADS),
            cores=None,
        )

    def _limit(self, work: list[ThreadLimit]) -> None:
        self._threads = work[0].threads

    @property
    def share(self) -> float:
        """Of the optimizer on the host."""
        decided: ZenFlowPlan = self.host.decided
        return decided.host_share

    @property
    def seconds(self) -> float:
        """Of a step, as things are."""
        return self.machine.step(self._threads, self.share)

    def _typical_step(self) -> MeasuredStep:
        device, worker, wait = map(statistics.median, zip(*self._steps, strict=True))
        there = self.machine.there
        estimate = there * self.share / EXACT_OVER_ESTIMATE
        inside = wait + there * (1.0 - self.share) + estimate
        return MeasuredStep(device, inside, wait, worker, 0.1, estimate=estimate)

    def run(self, steps: int) -> None:
        """Take so many steps."""

        with (
            patch.object(first_steps, "move", _move),
            patch.object(memory, "total_accelerator_bytes", lambda: TOTAL),
            patch.object(memory, "unused_accelerator_bytes", lambda: self._room),
        ):
            for _ in range(steps):
                plan = self.schedule.plan()
                passed = self.machine.passed(self._threads, self.share)
                beside = self.machine.beside(self._threads, self.share)
                if self.plans and plan.waits_last is not self._waited:
                    self._steps.clear()
                self._waited, self.metrics.newest["worker"] = plan.waits_last, passed
                whole = self.machine.step(self._threads, self.share)
                there = self.machine.there * (1.0 - self.share)
                device = self.machine.device if plan.waits_last else beside
                wait = passed if plan.waits_last else whole - there - device
                self._steps.append((device, passed, wait))
                self.schedule.advance(plan)
                self.first_steps.after_step(self.host, plan)
                self.plans.append((self.share, self.first_steps.threads))

    def resume(self, saved: VirtualRun, *, is_elsewhere: bool) -> None:
        """Go on from a checkpoint of another run."""
        self.schedule.state = saved.schedule.state
        decided: ZenFlowPlan = saved.host.decided
        heads = [each.head for each in decided.partitions]
        is_chosen = saved.first_steps.is_chosen and not is_elsewhere
        threads = saved.first_steps.threads if is_chosen else None

        with patch.object(first_steps, "move", _move):
            self.first_steps.resume(self.host, heads, threads)
