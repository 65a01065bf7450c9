"""Distinguishes exceptions raised by a signal handler from those of the interrupted code.

A handler may raise anything, at any moment. Code that catches errors of its own calls could mistake
a handler's `TimeoutError`, for instance, for that of a connection.
"""

from __future__ import annotations

import signal
import traceback
from types import FunctionType, MethodType

__all__ = ["is_of_handler"]


def is_of_handler(error: BaseException) -> bool:
    """Whether a signal handler has raised `error`. Handlers are found if they are functions or
    methods."""
    handlers = map(signal.getsignal, signal.valid_signals())
    codes = {
        handler.__code__ for handler in handlers if isinstance(handler, (FunctionType, MethodType))
    }
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))
