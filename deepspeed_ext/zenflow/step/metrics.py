"""Measures each step, for the log, the monitor and the choice of the share."""

from __future__ import annotations

import statistics
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields

from deepspeed_ext.runtime.timing import Stopwatch
from deepspeed_ext.zenflow.plan.times import SETTLING_STEPS, MeasuredStep

_REMEMBERED = 64
_FEWEST = 5
"""Overlapped steps to measure before a run is judged by them."""
_SHOWN = {"wait": "wait", "worker": "worker", "link": "link", "device": "device"}
_SHOWN |= {"inside": "step", "gather": "gather"}
"""Parts of a step (`MeasuredStep`), and what logs call them."""


class Metrics:
    """Metrics of the last optimizer step.

    On an accelerator with streams, times are measured on its stream, and known one or more steps
    later.

    Attributes:
        newest: by part of a step, its newest time in seconds; those that were not measured yet are
            missing.
        bytes_down, bytes_up: bytes copied in this step from the accelerator to the arena, and back.
        waiting: runs while the accelerator must wait for the worker, or for copies to or from the
            arena.
        gathering: runs from the new weights to the end of the step: their all-gather, at stages 1
            and 2.
        estimating: runs while weights are estimated, without waits for what the estimate needs,
            while a share is chosen by that time; None: nobody asks for it.
    """

    def __init__(self) -> None:
        self.newest: dict[str, float] = {}
        self.bytes_down = self.bytes_up = 0
        self.waiting, self.gathering = Stopwatch(), Stopwatch()
        self.estimating: Stopwatch | None = None
        self._between, self._inside = Stopwatch(), Stopwatch()
        self._steps, self._is_synchronous = 0, True
        # of all overlapped steps, and what the coming one may hide
        self._waited = self._hidden_at_most = self._hideable = 0.0
        # by part, seconds in the latest successive steps that all overlapped, or all waited for
        # their own update
        self._alike: dict[str, deque[float]] = {}
        # Laps on an accelerator come later. By part, for each lap that has not come yet, oldest
        # first, whether its step belongs to `_alike`.
        self._counts = {part: deque[bool]() for part in ("wait", "gather", "inside")}
        self.begin_anew()

    def begin_step(self) -> None:
        """Start timing an optimizer step."""
        self._between.stop()
        self._inside.start()
        self.bytes_down, self.bytes_up = 0, 0
        laps = self._between.lap()
        if self._steps:  # the first step has no previous one
            self._note("device", laps, laps)

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
        watches = {"wait": self.waiting, "gather": self.gathering, "inside": self._inside}
        for part, watch in watches.items():
            laps, counts = watch.lap(), self._counts[part]
            counts.append(True)
            alike = [lap for lap in laps if not counts or counts.popleft()]
            self._note(part, laps, alike)
            if part == "wait" and not synchronous:
                self._waited += sum(alike)
                self._hidden_at_most += self._hideable
        self._hideable = 0.0
        if self.estimating is not None:
            self._alike["estimate"].extend(self.estimating.lap())
        if self._steps <= SETTLING_STEPS:
            self.begin_anew()

    def _note(self, part: str, laps: list[float], alike: list[float]) -> None:
        if laps:
            self.newest[part] = laps[-1]
        self._alike[part].extend(alike)

    def begin_anew(self) -> None:
        """Forget the steps so far, those too whose laps have not come yet."""
        self._alike = {part.name: deque(maxlen=_REMEMBERED) for part in fields(MeasuredStep)}
        for part, coming in self._counts.items():
            self._counts[part] = deque(False for _ in coming)

    def note_worker(self, seconds: float, gradients: int) -> None:
        """Record the worker's answer to a submission.

        Args:
            seconds: duration of its passes over all partitions.
            gradients: number of gradients in the submission; 0: it only published again.
        """
        self._hideable += seconds
        self._note("worker", [seconds], [seconds] if gradients else [])

    def note_link(self, seconds: float) -> None:
        """Record the duration of copies beside the step, in both directions; 0: none were
        measured."""
        if seconds:
            self._hideable += seconds
            self._note("link", [seconds], [seconds])

    def typical_step(self) -> MeasuredStep | None:
        """Medians over the latest successive steps that all overlapped, or all waited; None: there
        are none, or the accelerator took no time."""
        typical = {part: statistics.median(past or [0.0]) for part, past in self._alike.items()}
        is_known = self._alike["inside"] and self._alike["worker"] and typical["device"] > 0.0
        return MeasuredStep(**typical) if is_known else None

    def as_dict(self) -> dict[str, float]:
        """The measured metrics by name, for logs; times in milliseconds, sizes in bytes.
        ``overlap`` is the fraction of the worker's and the copies' time in which the accelerator
        did not wait, over all overlapped steps so far."""
        found = {
            f"{name}_ms": self.newest[part] * 1e3
            for part, name in _SHOWN.items()
            if part in self.newest
        }
        if self._hidden_at_most > 0:
            found["overlap"] = max(0.0, 1.0 - self._waited / self._hidden_at_most)
        found |= {"bytes_down": float(self.bytes_down), "bytes_up": float(self.bytes_up)}
        if self._is_synchronous or len(self._alike["inside"]) < _FEWEST:
            return found
        step = self.typical_step()
        told = {} if step is None else {"slowdown": step.slowdown, "limit": float(step.limit)}
        return found | told
