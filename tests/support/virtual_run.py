"""Runs the choice of a plan on a machine of virtual time: real decisions, and steps that only count
seconds."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from deepspeed_ext.config import ZenFlowConfig
from deepspeed_ext.runtime import memory
from deepspeed_ext.zenflow import moving, tuner
from deepspeed_ext.zenflow.plan.advice import MeasuredStep
from deepspeed_ext.zenflow.plan.decide import decide
from deepspeed_ext.zenflow.plan.facts import Caller, Cpus, RankFacts, Run, ZenFlowFacts
from deepspeed_ext.zenflow.plan.plan import ZenFlowPlan
from deepspeed_ext.zenflow.plan.probe import thread_counts
from deepspeed_ext.zenflow.plan.search import Measured
from deepspeed_ext.zenflow.rules.predictive.schedule import PredictiveSchedule, PredictiveState

__all__ = ["THREADS", "WARM_UP", "Machine", "VirtualRun", "phases"]

NUMEL, TOTAL, THREADS = 1 << 28, 80 << 30, 8
WARM_UP, REMEMBERED = 10, 64


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

    def __init__(self, run: VirtualRun) -> None:
        self._run = run

    def minimum(self, *values: int) -> tuple[int, ...]:
        return values

    def gather_objects(self, mine: Measured) -> list[Measured]:
        times, slower = mine.times, self._run.machine.slower
        others = [replace(mine, times=replace(times, worker=times.worker * by)) for by in slower]
        return [mine, *others]


@dataclass(frozen=True)
class Checkpoint:
    """What a run has saved."""

    plans: list[tuple[float, int]]
    schedule: PredictiveState
    is_overlapped: bool
    heads: list[int]
    threads: int
    device_seconds: float
    measured: Mapping[str, Any] | None


class VirtualRun:
    """One run: the real `Tuner` around steps of a `Machine`.

    Args:
        room: fraction of the accelerator's memory that is free.
        section: fields of the ``zenflow`` section.

    Attributes:
        machine: as of the coming step.
        plans: after each step, share on the host and threads, as decided.
    """

    def __init__(
        self, machine: Machine, *, stage: int = 2, room: float = 0.5, **section: Any
    ) -> None:
        self._settings: dict[str, Any] = {"stage": stage, "room": room, **section}
        self._room = round(room * TOTAL)
        self.machine = machine
        self.plans: list[tuple[float, int]] = []
        self._passes: deque[float] = deque(maxlen=REMEMBERED)
        self._devices: deque[float] = deque(maxlen=REMEMBERED)
        self._is_alone = self._is_resumed = False
        self._is_overlapped = False
        self._threads, self._newest = THREADS, math.nan
        rank = RankFacts((Run(NUMEL),), TOTAL, TOTAL, cpus=Cpus("0-1", "2-9", THREADS))
        divided = stage == 3
        caller = Caller("bfloat16", "bfloat16", takes_gradients=True, partitions_weights=divided)
        facts = ZenFlowFacts((rank,), caller)
        config = ZenFlowConfig(**section)
        decided = decide(facts, config, host_share=None, is_asked=False)
        assert decided.measures_share
        self._schedule = PredictiveSchedule(True, WARM_UP)
        link = SimpleNamespace(
            deferring_errors=contextlib.nullcontext,
            limit_threads=self._limit,
            phase=None,
        )
        self._host: Any = SimpleNamespace(
            decided=decided,
            ranks=_Ranks(self),
            link=link,
            rule=SimpleNamespace(schedule=self._schedule, block_size=decided.rule.block_size),
            states=[SimpleNamespace(master=SimpleNamespace(numel=lambda: NUMEL))],
            expose=lambda **_: True,
        )
        metrics: Any = SimpleNamespace(
            typical=lambda: (self._newest, statistics.median(self._devices)),
            typical_step=self._typical_step,
            adviser=None,
            link_seconds=0.1,
            samples=lambda: {"worker": list(self._passes), "device": list(self._devices)},
            resume=self._resume,
        )
        self._metrics = metrics
        counts = thread_counts(THREADS)
        self._tuner = tuner.Tuner(metrics, config, chooses_share=True, threads=counts)

    def _limit(self, threads: int) -> None:
        self._threads = threads

    def _resume(self, samples: Mapping[str, Any]) -> None:
        self._is_resumed = not samples  # `Metrics` then leaves out the time since the last step
        for each, name in ((self._passes, "worker"), (self._devices, "device")):
            each.clear()
            each.extend(samples.get(name, ()))

    def _typical_step(self) -> MeasuredStep:
        here = self.machine, self._threads, self.share
        device, total = statistics.median(self._devices), Machine.step(*here)
        there = self.machine.there * (1.0 - self.share)
        wait, worker = total - there - device, statistics.median(self._passes)
        over = tuner.there_over_estimate(self._host.decided)
        estimate = self.machine.there * self.share / over
        inside = wait + there + estimate
        return MeasuredStep(device, inside, wait, worker, 0.1, estimate=estimate)

    @property
    def share(self) -> float:
        """Of the optimizer on the host."""
        decided: ZenFlowPlan = self._host.decided
        return decided.host_share

    @property
    def has_chosen(self) -> bool:
        """Whether the plan was chosen from measured steps."""
        return self._tuner.device_seconds > 0.0

    @property
    def seconds(self) -> float:
        """Of a step, as things are."""
        return self.machine.step(self._threads, self.share)

    @property
    def moves(self) -> int:
        """How often the plan has changed."""
        return sum(one != other for one, other in itertools.pairwise(self.plans))

    def run(self, steps: int) -> None:
        """Take so many steps."""
        with self._moved():
            for _ in range(steps):
                plan = self._schedule.plan()
                if plan.waits_last is self._is_overlapped:  # `Metrics` forgets its steps, too
                    self._is_overlapped = not self._is_overlapped
                    self._resume({})
                    self._is_resumed = False
                self._newest = self.machine.passed(self._threads, self.share)
                is_alone = self._is_alone or plan.waits_last
                beside = self.machine.beside(self._threads, self.share)
                if not self._is_resumed:
                    self._devices.append(self.machine.device if is_alone else beside)
                self._is_alone, self._is_resumed = self._tuner.is_apart, False
                self._metrics.worker_seconds = self._newest
                self._passes.append(self._newest)
                self._metrics.wait_seconds = self._newest + 0.1
                self._schedule.advance(plan)
                self._tuner.after_step(self._host, plan)
                self.plans.append((self.share, self._host.decided.cpus.threads))

    def resume(
        self,
        threads: int,
        device_seconds: float,
        *,
        is_elsewhere: bool,
        measured: Mapping[str, Any] | None = None,
    ) -> None:
        """Go on from a checkpoint."""
        self._tuner.resumed(
            self._host,
            threads,
            device_seconds,
            is_elsewhere=is_elsewhere,
            measured=measured,
        )

    def saved(self, *, is_elsewhere: bool) -> VirtualRun:
        """A new run that goes on from a checkpoint of this one."""
        other = VirtualRun(self.machine, **self._settings)
        other.load(self.checkpoint(), is_elsewhere=is_elsewhere)
        return other

    def checkpoint(self) -> Checkpoint:
        """What a load needs."""
        decided: ZenFlowPlan = self._host.decided
        return Checkpoint(
            list(self.plans),
            self._schedule.state,
            self._is_overlapped,
            [each.head for each in decided.partitions],
            self._threads,
            self._tuner.device_seconds,
            copy.deepcopy(self._tuner.measured()),
        )

    def load(self, saved: Checkpoint, *, is_elsewhere: bool = False) -> None:
        """Go on from `saved`."""
        self.plans = list(saved.plans)
        with self._moved():
            self._tuner.adopt(self._host, saved.heads)
        self.resume(
            saved.threads,
            saved.device_seconds,
            is_elsewhere=is_elsewhere,
            measured=None if is_elsewhere else saved.measured,
        )
        self._schedule.state = saved.schedule
        self._is_overlapped = saved.is_overlapped
        self._is_alone = False

    @contextlib.contextmanager
    def _moved(self) -> Iterator[None]:
        """A share moves at once, and all memory is free."""

        def move(host: Any, plan: ZenFlowPlan, *, hides: bool) -> bool:
            host.decided = plan
            return True

        with (
            patch.object(moving, "move", move),
            patch.object(memory, "total_accelerator_bytes", lambda: TOTAL),
            patch.object(memory, "unused_accelerator_bytes", lambda: self._room),
        ):
            yield


def phases(run: VirtualRun, machines: Sequence[Machine], steps: int) -> list[float]:
    """How many times as long as the best step of its machine the last one of each phase takes."""
    found = []
    for machine in machines:
        run.machine = machine
        run.run(steps)
        found.append(run.seconds / machine.best)
    return found
