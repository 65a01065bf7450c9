"""Writes the files of a save that goes on, in a thread for which the process does not wait at exit;
lets ranks report in files that theirs are written, once they cannot meet in a collective any more.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from deepspeed_ext.checkpoint.folder import last_written
from deepspeed_ext.errors import CheckpointError
from deepspeed_ext.runtime import files
from deepspeed_ext.runtime.log import one_line

__all__ = ["begin_writing", "remove_reports", "report", "wait_for_reports"]

_POLL_SECONDS = 0.05
SILENCE_SECONDS = 30.0


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


def report(staging: str, rank: int, problem: str) -> None:
    """Report that this rank has written its files to the folder `staging`; or, if `problem` is not
    empty, why it could not. `wait_for_reports` gives up without this file."""
    with contextlib.suppress(OSError):
        files.replace_file(_report_of(staging, rank), problem)


def wait_for_reports(staging: str, ranks: Sequence[int]) -> None:
    """Wait until `ranks` have reported.

    Raises:
        CheckpointError: one could not write, or none has written for `SILENCE_SECONDS`.
    """
    newest, silent_since = 0.0, time.monotonic()
    while missing := [rank for rank in ranks if not os.path.exists(_report_of(staging, rank))]:
        if (last := last_written([staging])) != newest:
            newest, silent_since = last, time.monotonic()
        if time.monotonic() - silent_since > SILENCE_SECONDS:
            raise CheckpointError(
                f"ranks {missing} have written nothing for {SILENCE_SECONDS:g} s: they have ended, "
                "or do not call engine.destroy(), which every rank must when training ends"
            )
        time.sleep(_POLL_SECONDS)
    told = {rank: Path(_report_of(staging, rank)).read_text(encoding="utf-8") for rank in ranks}
    if problems := [f"rank {rank}: {problem}" for rank, problem in told.items() if problem]:
        raise CheckpointError("; ".join(problems))


def remove_reports(staging: str, ranks: Sequence[int]) -> None:
    """Remove the reports; a later save removes what an exception leaves."""
    for rank in ranks:
        with contextlib.suppress(OSError):
            os.unlink(_report_of(staging, rank))


def _report_of(staging: str, rank: int) -> str:
    return files.beside(staging, f"written-{rank}")
