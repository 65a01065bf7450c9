"""Distinguishes exceptions raised by a signal handler from those of the interrupted code.

A handler may raise anything, at any moment. Code that catches a connection's `TimeoutError`, for
instance, could catch a handler's.
"""

from __future__ import annotations

import signal
import traceback
from types import FunctionType, MethodType

__all__ = ["is_of_handler"]


def is_of_handler(error: BaseException) -> bool:
    """Whether a signal handler that is a function or method has raised `error`."""
    handlers = map(signal.getsignal, signal.valid_signals())
    codes = {
        handler.__code__ for handler in handlers if isinstance(handler, (FunctionType, MethodType))
    }
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))
