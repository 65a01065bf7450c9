"""Lets a run that is interrupted save before it ends: all ranks after the same step, within a
bounded time."""

import os
import signal
import threading
from contextlib import suppress
from types import FrameType

GRACE_SECONDS = 60
"""From the signal to the end of the process, whatever it waits for. Most launchers and schedulers
give 30 seconds."""

NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class Interrupts:
    """Notes SIGINT and SIGTERM inside its block. A second SIGINT ends the process at once, without
    a traceback.

    Attributes:
        received: what has come, in words; None: nothing.
    """

    def __init__(self) -> None:
        self.received: str | None = None

    def __enter__(self) -> "Interrupts":
        # other threads may set no handlers: Ray's
        in_main = threading.current_thread() is threading.main_thread()
        self._before = {number: signal.signal(number, self._note) for number in NAMES if in_main}
        return self

    def __exit__(self, *error: object) -> None:
        signal.alarm(0)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = NAMES[signal.Signals(number)]
            # ends the process even inside a collective whose peer is gone
            signal.alarm(GRACE_SECONDS)
        if number == signal.SIGINT:  # SIGTERM may come again: launchers send it after Ctrl-C
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            if os.environ.get("RANK", "0") == "0":
                with suppress(OSError):  # not print, which this may have interrupted
                    os.write(
                        1,
                        b"\nCtrl-C: saving after this step; Ctrl-C again ends at once, without "
                        b"saving\n",
                    )


def end_at_once() -> None:
    """Let SIGINT and SIGTERM end this process without a traceback."""
    for number in NAMES:
        signal.signal(number, signal.SIG_DFL)
