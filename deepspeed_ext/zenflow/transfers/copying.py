"""Accelerator streams for copies, and waits for them: asleep if the accelerator supports it, and
with a limit if a peer may be gone."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from deepspeed_ext.runtime.backend import get_accelerator

_SHARE_ASLEEP = 0.05
_LONGEST_SLEEP_SECONDS = 0.01


# Note: [Streams of copies]
# torch has 32 streams of each priority for a process and device, and gives them again in turn.
# Communicators and DeepSpeed take theirs from those of default priority, and each engine takes
# more. A copy on a communicator's stream would wait for its collectives, which wait for other
# ranks. Copies to and from the host ignore priorities, so theirs is a pool that others leave alone.


def new_stream() -> Any:
    """A stream on the current device for copies, of high priority if the accelerator has
    priorities; see Note: [Streams of copies]."""
    try:
        return get_accelerator().Stream(priority=-1)
    except TypeError:
        return get_accelerator().Stream()


def recorded(stream: Any) -> Any:
    """An event after everything that was launched on `stream` so far, on which a thread sleeps
    instead of spinning, if the accelerator has such events."""
    try:
        event = get_accelerator().Event(blocking=True)
    except TypeError:
        event = get_accelerator().Event()
    event.record(stream)
    return event


def have_ended(streams: Collection[Any], seconds: float) -> bool:
    """Wait for everything launched on `streams` so far, with a limit: a stream may hold a
    collective that a peer never launches.

    Returns:
        Whether all of it is done; False also if the accelerator has failed.
    """
    begin, ends = time.monotonic(), []
    try:
        for stream in streams:
            ends.append(recorded(stream))
        while not all(end.query() for end in ends):
            if (passed := time.monotonic() - begin) > seconds:
                return False
            time.sleep(min(_SHARE_ASLEEP * passed, _LONGEST_SLEEP_SECONDS))
    except RuntimeError:
        return False
    return True
