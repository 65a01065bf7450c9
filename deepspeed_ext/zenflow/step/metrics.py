"""Measures each step, for the log, the monitor and the choice of the share."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields

from deepspeed_ext.runtime.timing import Stopwatch
from deepspeed_ext.zenflow.plan.share import SETTLING_STEPS, MeasuredStep

__all__ = ["Metrics"]

_REMEMBERED = 64
_FEWEST = 5
"""Overlapped steps to measure before a run is judged by them."""


def _nothing_yet() -> dict[str, deque[float]]:
    """For each part of a step, seconds in the latest successive steps that all overlapped, or all
    waited for their own update: named as in `MeasuredStep`, those of the worker per gradient."""
    return {part.name: deque(maxlen=_REMEMBERED) for part in fields(MeasuredStep)}


@dataclass
class Metrics:
    """Metrics of the last optimizer step; times in seconds, sizes in bytes; NaN if not measured
    yet.

    On an accelerator with streams, times are measured on its stream, and known one or more steps
    later.
    """

    wait_seconds: float = field(default=math.nan, init=False)
    """Time that the accelerator waited for the worker, or for copies to or from the arena."""
    worker_seconds: float = field(default=math.nan, init=False)
    """Duration of the worker's newest pass, over all partitions."""
    link_seconds: float = field(default=math.nan, init=False)
    """Time of the copies beside the step, in both directions."""
    device_seconds: float = field(default=math.nan, init=False)
    """Time from the end of the previous step to the start of this one: forward, backward and
    everything else."""
    step_seconds: float = field(default=math.nan, init=False)
    """Time inside the optimizer step, waiting included."""
    gather_seconds: float = field(default=math.nan, init=False)
    """The part of `step_seconds` after the weights were written: their all-gather, at stages 1 and
    2."""
    overlap: float = field(default=math.nan, init=False)
    """Fraction of the worker's and those copies' total time in which the accelerator did not wait,
    over all overlapped steps so far."""
    bytes_down: int = field(default=0, init=False)
    """Bytes copied from the accelerator to the arena in this step."""
    bytes_up: int = field(default=0, init=False)
    """Bytes copied from the arena to the accelerator in this step."""
    waiting: Stopwatch = field(default_factory=Stopwatch)
    """Runs while the accelerator must wait."""
    gathering: Stopwatch = field(default_factory=Stopwatch)
    """Runs from the new weights to the end of the step."""
    estimating: Stopwatch | None = None
    """Runs while weights are estimated, without waits for what the estimate needs, while a share is
    chosen by that time; None: nobody asks for it."""
    _total_wait: float = field(default=0.0, init=False)
    _total_hideable: float = field(default=0.0, init=False)
    _hideable: float = field(default=0.0, init=False)
    _steps: int = field(default=0, init=False)
    _is_synchronous: bool = field(default=True, init=False)
    _alike: dict[str, deque[float]] = field(default_factory=_nothing_yet, init=False)
    _counts: list[deque[bool]] = field(
        default_factory=lambda: [deque() for _ in range(3)], init=False
    )
    """Laps on an accelerator come later. Of waits, gathers and whole steps: for each lap that has
    not come yet, oldest first, whether its step belongs to `_alike`."""
    _between: Stopwatch = field(default_factory=Stopwatch)
    _inside: Stopwatch = field(default_factory=Stopwatch)

    def begin_step(self) -> None:
        """Start timing an optimizer step."""
        self._between.stop()
        self._inside.start()
        self.bytes_down, self.bytes_up = 0, 0
        between = self._between.lap()
        if self._steps:  # the first step has no previous one
            self.device_seconds = _newest(between, self.device_seconds)
            self._alike["device"].extend(between)

    def timing_estimate(self) -> AbstractContextManager[None]:
        """Time an estimate of weights, if anybody asks for it."""
        return nullcontext() if self.estimating is None else self.estimating.measured()

    def end_step(self, synchronous: bool) -> None:
        """Stop timing the optimizer step. A `synchronous` step waits for its own update, and hides
        nothing."""
        self._inside.stop()
        self._between.start()
        self._steps += 1
        if synchronous is not self._is_synchronous:
            self.begin_anew()
        self._is_synchronous = synchronous
        waits, gathers, insides = self.waiting.lap(), self.gathering.lap(), self._inside.lap()
        self.wait_seconds = _newest(waits, self.wait_seconds)
        self.gather_seconds = _newest(gathers, self.gather_seconds)
        self.step_seconds = _newest(insides, self.step_seconds)
        past = self._alike
        waits = self._alike_of(waits, self._counts[0])
        past["wait"].extend(waits)
        past["gather"].extend(self._alike_of(gathers, self._counts[1]))
        past["inside"].extend(self._alike_of(insides, self._counts[2]))
        if self.estimating is not None:
            past["estimate"].extend(self.estimating.lap())
        if not synchronous:
            self._total_wait += sum(waits)
            self._total_hideable += self._hideable
        self._hideable = 0.0
        if self._total_hideable > 0:
            self.overlap = max(0.0, 1.0 - self._total_wait / self._total_hideable)
        if self._steps <= SETTLING_STEPS:
            self.begin_anew()

    @staticmethod
    def _alike_of(laps: list[float], counts: deque[bool]) -> list[float]:
        """The `laps` of steps that belong to `_alike`; one more step, which has a lap, has
        ended."""
        counts.append(True)
        return [lap for lap in laps if not counts or counts.popleft()]

    def begin_anew(self) -> None:
        """Forget the steps so far, those too whose laps have not come yet."""
        self._alike = _nothing_yet()
        self._counts = [deque(False for _ in coming) for coming in self._counts]

    def note_worker(self, seconds: float, gradients: int) -> None:
        """Record the worker's answer to a submission.

        Args:
            seconds: duration of its passes.
            gradients: number of gradients in the submission; 0: it only published again.
        """
        self.worker_seconds = seconds
        self._hideable += seconds
        if gradients:
            self._alike["worker"].append(seconds / gradients)

    def note_link(self, seconds: float) -> None:
        """Record the duration of copies beside the step; 0: none were measured."""
        if seconds:
            self.link_seconds = seconds
            self._hideable += seconds
            self._alike["link"].append(seconds)

    def typical_step(self) -> MeasuredStep | None:
        """Medians over the latest successive steps that all overlapped, or all waited; None: there
        are none, or the accelerator took no time."""
        step = MeasuredStep(**{part: _median(seconds) for part, seconds in self._alike.items()})
        is_known = self._alike["inside"] and self._alike["worker"] and step.device > 0.0
        return step if is_known else None

    def as_dict(self) -> dict[str, float]:
        """The measured metrics by name, for logs; times in milliseconds, sizes in bytes."""
        figures = {
            "wait_ms": self.wait_seconds * 1e3,
            "worker_ms": self.worker_seconds * 1e3,
            "link_ms": self.link_seconds * 1e3,
            "device_ms": self.device_seconds * 1e3,
            "step_ms": self.step_seconds * 1e3,
            "gather_ms": self.gather_seconds * 1e3,
            "overlap": self.overlap,
            "bytes_down": float(self.bytes_down),
            "bytes_up": float(self.bytes_up),
        }
        found = {name: value for name, value in figures.items() if not math.isnan(value)}
        if self._is_synchronous or len(self._alike["inside"]) < _FEWEST:
            return found
        step = self.typical_step()
        told = {} if step is None else {"slowdown": step.slowdown, "limit": float(step.limit)}
        return found | told


def _median(values: Sequence[float]) -> float:
    """0 if there are none."""
    return statistics.median(values) if values else 0.0


def _newest(laps: list[float], otherwise: float) -> float:
    return laps[-1] if laps else otherwise
