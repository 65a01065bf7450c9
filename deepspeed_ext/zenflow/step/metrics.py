"""Measures each step, for the log, the monitor and the choice of the share."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from deepspeed_ext.runtime.stopwatch import Stopwatch, stopwatch
from deepspeed_ext.zenflow.plan.advice import MeasuredStep
from deepspeed_ext.zenflow.step.adviser import Adviser

__all__ = ["Metrics"]

_REMEMBERED = 64
_SETTLING_STEPS = 2  # the first steps touch memory and warm caches


def _seconds() -> deque[float]:
    return deque(maxlen=_REMEMBERED)


@dataclass
class _Overlapped:
    """For each part of a step, seconds in the latest successive overlapped steps.

    Attributes:
        worker: pass time, per gradient.
    """

    inside: deque[float] = field(default_factory=_seconds)
    wait: deque[float] = field(default_factory=_seconds)
    gather: deque[float] = field(default_factory=_seconds)
    worker: deque[float] = field(default_factory=_seconds)
    link: deque[float] = field(default_factory=_seconds)
    estimate: deque[float] = field(default_factory=_seconds)


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
    waiting: Stopwatch = field(default_factory=stopwatch)
    """Runs while the accelerator must wait."""
    gathering: Stopwatch = field(default_factory=stopwatch)
    """Runs from the new weights to the end of the step."""
    estimating: Stopwatch | None = None
    """Runs while weights are estimated, without waits for what the estimate needs, while a share is
    chosen by that time; None: nobody asks for it."""
    adviser: Adviser | None = None
    """Judges overlapped steps; None: no judgement."""
    _total_wait: float = field(default=0.0, init=False)
    _total_hideable: float = field(default=0.0, init=False)
    _hideable: float = field(default=0.0, init=False)
    _worker: list[float] = field(default_factory=list, init=False)
    _device: list[float] = field(default_factory=list, init=False)
    _overlapped: _Overlapped = field(default_factory=_Overlapped, init=False)
    _is_resumed: bool = field(default=False, init=False)
    _left_out: list[deque[bool]] = field(
        default_factory=lambda: [deque() for _ in range(3)], init=False
    )
    """Of waits, gathers and whole steps: for each lap that has not come yet, oldest first, whether
    its step is not among the latest successive overlapped ones."""
    _between: Stopwatch = field(default_factory=stopwatch)
    _inside: Stopwatch = field(default_factory=stopwatch)

    def begin_step(self) -> None:
        """Start timing an optimizer step."""
        self._between.stop()
        self._inside.start()
        self.bytes_down, self.bytes_up = 0, 0
        between = self._between.lap()
        if self._is_resumed:  # no step before it in this process
            self._is_resumed = False
            return
        if self._device:  # the first step has no previous one
            self.device_seconds = _newest(between, self.device_seconds)
        self._device = [*self._device[-_REMEMBERED:], *between]

    def timing_estimate(self) -> AbstractContextManager[None]:
        """Time an estimate of weights, if anybody asks for it."""
        return nullcontext() if self.estimating is None else self.estimating.measured()

    def end_step(self, synchronous: bool) -> None:
        """Stop timing the optimizer step. A `synchronous` step waits for its own update, or for the
        pass over its gradient, and hides nothing."""
        self._inside.stop()
        self._between.start()
        waits, gathers, insides = self.waiting.lap(), self.gathering.lap(), self._inside.lap()
        estimates = [] if self.estimating is None else self.estimating.lap()
        self.wait_seconds = _newest(waits, self.wait_seconds)
        self.gather_seconds = _newest(gathers, self.gather_seconds)
        self.step_seconds = _newest(insides, self.step_seconds)
        waits, gathers, insides = (
            self._of_overlapped(laps, left_out, synchronous)
            for laps, left_out in zip((waits, gathers, insides), self._left_out, strict=True)
        )
        self._total_wait += sum(waits)
        if not synchronous:
            self._total_hideable += self._hideable
        self._hideable = 0.0
        if self._total_hideable > 0:
            self.overlap = max(0.0, 1.0 - self._total_wait / self._total_hideable)
        if synchronous:
            self._begin_anew()
            return
        past = self._overlapped
        past.wait.extend(waits)
        past.gather.extend(gathers)
        past.inside.extend(insides)
        past.estimate.extend(estimates)
        adviser, measured = self.adviser, len(past.inside)
        is_chosen = self.estimating is None  # otherwise the run may soon help itself
        if adviser is not None and is_chosen and adviser.is_due(measured):
            adviser.judge(self.typical_step())

    @staticmethod
    def _of_overlapped(laps: list[float], left_out: deque[bool], synchronous: bool) -> list[float]:
        """Those of `laps` that came only now and belong to the latest successive overlapped steps;
        a step has one lap, and ends now."""
        left_out.append(synchronous)
        return [lap for lap in laps if not (left_out and left_out.popleft())]

    def _begin_anew(self) -> None:
        """Forget the overlapped steps so far, those too whose laps have not come yet."""
        self._overlapped = _Overlapped()
        self._left_out = [deque(True for _ in coming) for coming in self._left_out]

    def note_worker(self, seconds: float, gradients: int) -> None:
        """Record the worker's answer to a submission.

        Args:
            seconds: duration of its passes.
            gradients: number of gradients in the submission; 0: it only published again.
        """
        self.worker_seconds = seconds
        self._hideable += seconds
        if gradients:
            self._worker = [*self._worker[-_REMEMBERED:], seconds]
            self._overlapped.worker.append(seconds / gradients)

    def note_link(self, seconds: float) -> None:
        """Record the duration of copies beside the step; 0: none were measured."""
        if seconds:
            self.link_seconds = seconds
            self._hideable += seconds
            self._overlapped.link.append(seconds)

    def typical(self) -> tuple[float, float]:
        """Median seconds of the worker's pass and of the accelerator's step, without the first
        few."""
        worker, device = self._worker[_SETTLING_STEPS:], self._device[_SETTLING_STEPS:]
        return _median(worker), _median(device)

    def typical_step(self) -> MeasuredStep | None:
        """Medians over the latest successive overlapped steps; None: there is none, or the
        accelerator took no time."""
        past = self._overlapped
        device = _median(self._device[-len(past.inside) :])
        if not (past.inside and past.worker and device > 0.0):
            return None
        worker, link = _median(past.worker), _median(past.link)
        inside, wait, gather = map(_median, (past.inside, past.wait, past.gather))
        return MeasuredStep(device, inside, wait, worker, link, gather, _median(past.estimate))

    def samples(self) -> dict[str, list[float]]:
        """What medians are taken of, by name, for a checkpoint."""
        past = {name: list(values) for name, values in vars(self._overlapped).items()}
        alone = {"alone": self._worker, "device": self._device}
        return {**past, **{name: list(values) for name, values in alone.items()}}

    def resume(self, samples: Mapping[str, list[float]]) -> None:
        """Go on from `samples` of a checkpoint, or from none."""
        self._begin_anew()
        past = {name: deque(samples.get(name, ()), _REMEMBERED) for name in vars(_Overlapped())}
        self._overlapped, self._is_resumed = _Overlapped(**past), True
        self._worker, self._device = (list(samples.get(name, ())) for name in ("alone", "device"))

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
        judged = {} if self.adviser is None else self.adviser.measurements()
        return {name: value for name, value in figures.items() if not math.isnan(value)} | judged


def _median(values: Sequence[float]) -> float:
    """0 if there are none."""
    return statistics.median(values) if values else 0.0


def _newest(laps: list[float], otherwise: float) -> float:
    return laps[-1] if laps else otherwise
