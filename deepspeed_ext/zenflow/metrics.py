"""Measures each step, for the log, the monitor and the choice of the update interval."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

import torch

from deepspeed_ext.zenflow.stopwatch import Stopwatch, stopwatch

__all__ = ["Metrics", "PredictionProbe"]

_REMEMBERED = 64
_SETTLING_STEPS = 2  # the first steps touch memory and warm caches


@dataclass
class Metrics:
    """Metrics of the last optimizer step; times in seconds, sizes in bytes.

    On an accelerator with streams, times are those of its stream, and known a step or more later.
    """

    wait_seconds: float = 0.0
    """Time for which the accelerator waited for the worker, or for copies to or from the arena."""
    worker_seconds: float = 0.0
    """Duration of the worker's newest pass, over all partitions."""
    link_seconds: float = 0.0
    """Time of the copies beside the step, of both directions."""
    device_seconds: float = 0.0
    """Time from the end of the previous step to the start of this one: forward, backward and everything else."""
    step_seconds: float = 0.0
    """Time inside the optimizer step, waiting included."""
    overlap: float = 0.0
    """Fraction of the worker's and those copies' total time for which the accelerator did not wait; since the start."""
    bytes_down: int = 0
    """Bytes copied from the accelerator to the arena in this step."""
    bytes_up: int = 0
    """Bytes copied from the arena to the accelerator in this step."""
    waiting: Stopwatch = field(default_factory=stopwatch)
    """Runs while the accelerator has to wait."""
    _total_wait: float = 0.0
    _total_hideable: float = 0.0
    _worker: list[float] = field(default_factory=list)
    _device: list[float] = field(default_factory=list)
    _between: Stopwatch = field(default_factory=stopwatch)
    _inside: Stopwatch = field(default_factory=stopwatch)

    def begin_step(self) -> None:
        """Start timing an optimizer step."""
        self._between.stop()
        self._inside.start()
        self.bytes_down, self.bytes_up = 0, 0
        between = self._between.lap()
        self.device_seconds = _newest(between, self.device_seconds)
        self._device = [*self._device[-_REMEMBERED:], *between]

    def end_step(self) -> None:
        """Stop timing the optimizer step."""
        self._inside.stop()
        self._between.start()
        waits = self.waiting.lap()
        self.wait_seconds = _newest(waits, self.wait_seconds)
        self._total_wait += sum(waits)
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
        self._total_hideable += seconds
        if gradients:
            self._worker = [*self._worker[-_REMEMBERED:], seconds]

    def note_link(self, seconds: float) -> None:
        """Record the duration of copies beside the step."""
        self.link_seconds = seconds
        self._total_hideable += seconds

    def typical(self) -> tuple[float, float]:
        """Median seconds of the worker's pass and of the accelerator's step, without the first ones."""
        worker, device = self._worker[_SETTLING_STEPS:], self._device[_SETTLING_STEPS:]
        return statistics.median(worker or [0.0]), statistics.median(device or [0.0])

    def as_dict(self, interval: int) -> dict[str, float]:
        """The metrics by name, for logs; times in milliseconds, sizes in bytes."""
        return {
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


def _newest(laps: list[float], otherwise: float) -> float:
    return laps[-1] if laps else otherwise


class PredictionProbe:
    """Compares, every 20 intervals, a sample of predicted weights with the worker's result for the same gradients."""

    EVERY_INTERVALS = 20
    SAMPLE_NUMEL = 1 << 16

    def __init__(self) -> None:
        self._intervals = 0
        self._prediction_error = self._rounding_error = math.nan
        self._predicted: torch.Tensor | None = None
        self._before: torch.Tensor | None = None

    def errors(self) -> dict[str, float]:
        """The newest sample, by name; NaN before the first sample.

        ``prediction_error`` is ``||W - p||`` and ``rounding_error`` is ``||round(p) - p||``, both over ``||p -
        p_before||``. round() converts to the model's dtype, so the second is the cost of low-precision weights without
        any prediction.
        """
        return {"prediction_error": self._prediction_error, "rounding_error": self._rounding_error}

    def arrived(self, master: torch.Tensor) -> None:
        """Compute the errors of the pending sample, if any, now that the worker's result is in `master` (1-D fp32,
        host)."""
        if self._predicted is not None and self._before is not None:
            now = master[: self._before.numel()].detach()
            moved = (now - self._before).norm().clamp_min(torch.finfo(torch.float32).tiny)
            self._prediction_error = float((self._predicted.float() - now).norm() / moved)
            self._rounding_error = float((now.to(self._predicted.dtype).float() - now).norm() / moved)
        self._predicted = self._before = None

    def predicted(self, weights: torch.Tensor, master: torch.Tensor) -> None:
        """Take a sample when one is due.

        Args:
            weights: 1-D, just predicted.
            master: 1-D fp32, host; the result on which the prediction is based.
        """
        if self._intervals % self.EVERY_INTERVALS == 0:
            self._predicted = weights[: self.SAMPLE_NUMEL].detach().to("cpu", copy=True)
            self._before = master[: self.SAMPLE_NUMEL].detach().clone()
        self._intervals += 1
