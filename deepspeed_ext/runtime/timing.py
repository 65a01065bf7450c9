"""Measures work on the host or on the accelerator, which runs asynchronously, and names it in
profiles. Nothing here waits."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.profiler import record_function

from deepspeed_ext.runtime.backend import get_accelerator

_NO_RANGE: AbstractContextManager[Any] = nullcontext()


def in_profile(name: str) -> AbstractContextManager[Any]:
    """Make the block a range ``deepspeed_ext.<name>`` of a running ``torch.profiler``. Without one
    it takes less than a microsecond; ``record_function`` would take 10 or more."""
    return (
        record_function(f"deepspeed_ext.{name}")
        if torch.autograd._profiler_enabled()
        else _NO_RANGE
    )


class _HostMoment:
    """What an event of an accelerator is to its stream: a moment of the host, which has passed."""

    def __init__(self) -> None:
        self._seconds = time.perf_counter()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _HostMoment) -> float:
        return (end._seconds - self._seconds) * 1e3


class Stopwatch:
    """Adds up time between `start` and `stop`, per lap: of the accelerator's work in the order of a
    stream, including waits for events, or of the host if the CPU is the accelerator."""

    def __init__(self) -> None:
        self._begin: Any = None
        self._pairs: list[tuple[Any, Any]] = []
        self._laps: deque[list[tuple[Any, Any]]] = deque()

    def start(self, stream: Any = None) -> None:
        """Begin a measurement, of an accelerator on `stream` (None: the current one)."""
        self._begin = _moment(stream)

    def stop(self, stream: Any = None) -> None:
        """End the measurement. Does nothing if none has begun."""
        if self._begin is not None:
            pair, self._begin = (self._begin, _moment(stream)), None
            self._pairs.append(pair)

    @contextmanager
    def measured(self, stream: Any = None) -> Iterator[None]:
        self.start(stream)
        try:
            yield
        finally:
            self.stop(stream)

    def lap(self) -> list[float]:
        """End a lap. Return the seconds of each finished lap that was not returned before, oldest
        first. On an accelerator a lap is finished when its work is done, perhaps laps later."""
        self._laps.append(self._pairs)
        self._pairs, finished = [], []
        while self._laps:
            # another thread may still add a pair; its time is then not counted
            pairs = tuple(self._laps[0])
            if not all(end.query() for _, end in pairs):
                break
            self._laps.popleft()
            finished.append(sum(begin.elapsed_time(end) for begin, end in pairs) / 1e3)
        return finished


def _moment(stream: Any) -> Any:
    accelerator = get_accelerator()
    if accelerator.is_synchronized_device():
        return _HostMoment()
    moment = accelerator.Event(enable_timing=True)
    moment.record(accelerator.current_stream() if stream is None else stream)
    return moment
