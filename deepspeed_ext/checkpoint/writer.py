"""Writes the files of a save that goes on, in a thread for which the process does not wait at
exit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from deepspeed_ext.errors import CheckpointError
from deepspeed_ext.runtime.log import one_line

__all__ = ["begin_writing"]


def begin_writing(jobs: list[Callable[[], None]]) -> Future[None]:
    """Call `jobs` in order, in a thread; return their result, or the first error.

    Python's own executors are no alternative: at exit, Python waits for their threads before any
    code could log or give up.

    Args:
        jobs: emptied, because they hold copies of tensors.
    """
    written: Future[None] = Future()
    thread = threading.Thread(
        target=_write, args=(jobs, written), name="deepspeed_ext-save", daemon=True
    )
    try:
        thread.start()
    except RuntimeError as error:  # the interpreter's, for any cause
        written.set_exception(
            CheckpointError(f"{error}. To go on: allow this user more threads (ulimit -u)")
        )
    return written


def _write(jobs: list[Callable[[], None]], written: Future[None]) -> None:
    try:
        while jobs:
            jobs.pop(0)()
    except Exception as error:
        written.set_exception(error)
    except BaseException as error:
        written.set_exception(CheckpointError(one_line(error)))
    else:
        written.set_result(None)
