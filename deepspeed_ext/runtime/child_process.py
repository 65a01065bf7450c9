"""Starts Python processes of this package, and ends them with the process that started them."""

import ctypes
import signal
import sys
from pathlib import Path

__all__ = ["end_with_parent", "python_command"]

START_PROCESS = Path(__file__).resolve().parent / "start_process.py"
_PR_SET_PDEATHSIG = 1


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs ``main()`` of a module of this copy of the package.

    Args:
        arguments: the module's ``sys.argv[1:]``.
    """
    return [sys.executable, str(START_PROCESS), module, *arguments]


def end_with_parent() -> None:
    """Let the kernel kill this process when the thread that started it ends.

    The thread may already have ended; the caller checks this afterwards.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
