"""Measures laps on the host or on the accelerator, which runs asynchronously. Nothing here
waits."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed_ext.runtime.backend import get_accelerator

__all__ = ["Stopwatch", "StreamStopwatch", "stopwatch"]


class Stopwatch(ABC):
    """Adds up time between `start` and `stop`, per lap."""

    @abstractmethod
    def start(self, stream: Any = None) -> None:
        """Begin a measurement, on `stream` (None: the current one) if it measures an
        accelerator."""

    @abstractmethod
    def stop(self, stream: Any = None) -> None:
        """End the measurement. Does nothing if none has begun."""

    @abstractmethod
    def lap(self) -> list[float]:
        """End a lap.

        Returns:
            Seconds measured in each finished lap that was not returned before, oldest first. A lap
            on an accelerator is finished when its work is done, so it may be returned some laps
            later.
        """

    @contextmanager
    def measured(self, stream: Any = None) -> Iterator[None]:
        """Measure the block."""
        self.start(stream)
        try:
            yield
        finally:
            self.stop(stream)


class HostStopwatch(Stopwatch):
    def __init__(self) -> None:
        self._seconds = 0.0
        self._begin: float | None = None

    def start(self, stream: Any = None) -> None:
        self._begin = time.perf_counter()

    def stop(self, stream: Any = None) -> None:
        if self._begin is not None:
            self._seconds += time.perf_counter() - self._begin
            self._begin = None

    def lap(self) -> list[float]:
        seconds, self._seconds = self._seconds, 0.0
        return [seconds]


class StreamStopwatch(Stopwatch):
    """Measures the time from `start` to `stop` on a stream of the accelerator, including waits for
    events."""

    def __init__(self) -> None:
        self._begin: Any = None
        self._pairs: list[tuple[Any, Any]] = []
        self._laps: deque[list[tuple[Any, Any]]] = deque()

    def start(self, stream: Any = None) -> None:
        self._begin = _recorded(stream)

    def stop(self, stream: Any = None) -> None:
        if self._begin is not None:
            pair, self._begin = (self._begin, _recorded(stream)), None
            self._pairs.append(pair)

    def lap(self) -> list[float]:
        self._laps.append(self._pairs)
        self._pairs, found = [], []
        while self._laps:
            # another thread may still add a pair; its time is then not counted
            pairs = tuple(self._laps[0])
            if not all(end.query() for _, end in pairs):
                break
            self._laps.popleft()
            found.append(sum(begin.elapsed_time(end) for begin, end in pairs) / 1e3)
        return found


def stopwatch() -> Stopwatch:
    """Return a stopwatch for the accelerator's work, in the order of its stream."""
    return HostStopwatch() if get_accelerator().is_synchronized_device() else StreamStopwatch()


def _recorded(stream: Any) -> Any:
    moment = get_accelerator().Event(enable_timing=True)
    moment.record(get_accelerator().current_stream() if stream is None else stream)
    return moment
