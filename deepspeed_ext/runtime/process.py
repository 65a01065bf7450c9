"""Starts Python processes of this package, ends them with the process that started them, and tells
the process, or the code, that a call belongs to.

# Note: [Forked processes]

A child that user code forks, such as a data loader's worker, inherits every object: sockets to the
optimizer process, whose answers it would take from its parent; locks held by threads that the child
does not have; process groups, in which its messages would mix with its parent's. So a call in a
child raises before it touches any of them, and finalizers and atexit functions do nothing there.
The child may use the plain module.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from pathlib import Path
from types import FunctionType, MethodType

from deepspeed_ext.errors import StateError

START_PROCESS = Path(__file__).resolve().parent / "start_process.py"
_PR_SET_PDEATHSIG = 1


def python_command(module: str, *arguments: str) -> list[str]:
    """The command that runs ``main()`` of a module of this copy of the package; `arguments` are its
    ``sys.argv[1:]``."""
    return [sys.executable, str(START_PROCESS), module, *arguments]


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends. It may have ended
    before; the caller checks this afterwards."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def is_of_handler(error: BaseException) -> bool:
    """Whether a signal handler that is a function or method has raised `error`: code that catches a
    connection's `TimeoutError`, for instance, could catch a handler's."""
    handlers = map(signal.getsignal, signal.valid_signals())
    codes = {
        handler.__code__ for handler in handlers if isinstance(handler, (FunctionType, MethodType))
    }
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


class OwnProcess:
    """The process that created this object, `what` in messages."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is that process, not one forked from it."""
        return os.getpid() == self._pid

    def require(self) -> None:
        """Check that this is that process.

        Raises:
            StateError: this process was forked from it.
        """
        if os.getpid() != self._pid:  # not `is_here`: steps call this 30 times
            raise StateError(
                f"{self._what} belongs to process {self._pid}, but was called in process "
                f"{os.getpid()}, which was forked from it: call it in the process that trains"
            )
