"""Measures each step, for the log, the monitor and the choice of the update interval."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

from deepspeed_ext.runtime.stopwatch import Stopwatch, stopwatch

__all__ = ["Metrics"]

_REMEMBERED = 64
_SETTLING_STEPS = 2  # the first steps touch memory and warm caches


@dataclass
class Metrics:
    """Metrics of the last optimizer step; times in seconds, sizes in bytes. Values not measured yet are NaN.

    On an accelerator with streams, times are measured on its stream and known a step or more later.
    """

    wait_seconds: float = field(default=math.nan, init=False)
    """Time that the accelerator waited for the worker, or for copies to or from the arena."""
    worker_seconds: float = field(default=math.nan, init=False)
    """Duration of the worker's newest pass, over all partitions."""
    link_seconds: float = field(default=math.nan, init=False)
    """Time of the copies beside the step, in both directions."""
    device_seconds: float = field(default=math.nan, init=False)
    """Time from the end of the previous step to the start of this one: forward, backward and everything else."""
    step_seconds: float = field(default=math.nan, init=False)
    """Time inside the optimizer step, waiting included."""
    overlap: float = field(default=math.nan, init=False)
    """Fraction of the total time of the worker and those copies during which the accelerator did not wait, over all
    overlapped steps so far."""
    bytes_down: int = field(default=0, init=False)
    """Bytes copied from the accelerator to the arena in this step."""
    bytes_up: int = field(default=0, init=False)
    """Bytes copied from the arena to the accelerator in this step."""
    waiting: Stopwatch = field(default_factory=stopwatch)
    """Runs while the accelerator must wait."""
    _total_wait: float = field(default=0.0, init=False)
    _total_hideable: float = field(default=0.0, init=False)
    _hideable: float = field(default=0.0, init=False)
    _worker: list[float] = field(default_factory=list, init=False)
    _device: list[float] = field(default_factory=list, init=False)
    _between: Stopwatch = field(default_factory=stopwatch)
    _inside: Stopwatch = field(default_factory=stopwatch)

    def begin_step(self) -> None:
        """Start timing an optimizer step."""
        self._between.stop()
        self._inside.start()
        self.bytes_down, self.bytes_up = 0, 0
        between = self._between.lap()
        if self._device:  # the first step has no previous one
            self.device_seconds = _newest(between, self.device_seconds)
        self._device = [*self._device[-_REMEMBERED:], *between]

    def end_step(self, synchronous: bool) -> None:
        """Stop timing the optimizer step. A step that is `synchronous` waits for its own update and hides nothing."""
        self._inside.stop()
        self._between.start()
        waits = self.waiting.lap()
        self.wait_seconds = _newest(waits, self.wait_seconds)
        if not synchronous:
            self._total_wait += sum(waits)
            self._total_hideable += self._hideable
        self._hideable = 0.0
        self.step_seconds = _newest(self._inside.lap(), self.step_seconds)
        if self._total_hideable > 0:
            self.overlap = max(0.0, 1.0 - self._total_wait / self._total_hideable)

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

    def note_link(self, seconds: float) -> None:
        """Record the duration of copies beside the step; 0: there were none."""
        if seconds:
            self.link_seconds = seconds
            self._hideable += seconds

    def typical(self) -> tuple[float, float]:
        """Median seconds of the worker's pass and of the accelerator's step, without the first ones."""
        worker, device = self._worker[_SETTLING_STEPS:], self._device[_SETTLING_STEPS:]
        return statistics.median(worker or [0.0]), statistics.median(device or [0.0])

    def as_dict(self, interval: int) -> dict[str, float]:
        """The measured metrics by name, for logs; times in milliseconds, sizes in bytes."""
        figures = {
            "wait_ms": self.wait_seconds * 1e3,
            "worker_ms": self.worker_seconds * 1e3,
            "link_ms": self.link_seconds * 1e3,
            "device_ms": self.device_seconds * 1e3,
            "step_ms": self.step_seconds * 1e3,
            "overlap": self.overlap,
            "bytes_down": float(self.bytes_down),
            "bytes_up": float(self.bytes_up),
            "interval": float(interval),
        }
        return {name: value for name, value in figures.items() if not math.isnan(value)}


def _newest(laps: list[float], otherwise: float) -> float:
    return laps[-1] if laps else otherwise
