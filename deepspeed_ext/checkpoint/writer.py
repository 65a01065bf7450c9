"""Writes files in a thread for which the process does not wait at exit."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

__all__ = ["Writer"]


class Writer:
    """Runs jobs one after another in a separate thread.

    Python's own executors are no alternative: at exit, Python waits for their threads before any
    code could log or give up.

    Raises:
        RuntimeError: no thread can be started.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = (
            queue.SimpleQueue()
        )
        threading.Thread(
            target=_run, args=(self._jobs,), name="deepspeed_ext-save", daemon=True
        ).start()

    def submit(self, job: Callable[..., None], *args: object) -> Future[None]:
        """Run `job` after all earlier jobs; the future holds its error."""
        future: Future[None] = Future()
        self._jobs.put((future, partial(job, *args)))
        return future

    def end(self) -> None:
        """Tell the thread to end after its last job."""
        self._jobs.put(None)


def _run(jobs: queue.SimpleQueue[tuple[Future[None], Callable[[], None]] | None]) -> None:
    while (job := jobs.get()) is not None:
        future, work = job
        del job
        try:
            work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(None)
        del future, work  # they hold the copies of tensors
