"""Reports builds of DeepSpeed's operators, which torch compiles silently: the operator and the time
so far."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from deepspeed_ext.runtime import build_locks
from deepspeed_ext.runtime.log import logger

__all__ = ["announced"]

FIRST_SECONDS = 3.0
"""Loading an operator that is already compiled takes less than this."""
EVERY_SECONDS = 10.0


@contextmanager
def announced(operator: str) -> Iterator[None]:
    """Log that `operator` is being compiled: before the block if it is not compiled yet, and
    repeatedly if the block takes long."""
    begin, done = time.monotonic(), threading.Event()
    is_new = not any(build_locks.operator_folder().glob(f"**/{operator}/*.so"))
    if is_new:
        logger.info(f"compiling DeepSpeed's operator {operator} (once; a minute or more)")
    reporter = threading.Thread(
        target=_report, args=(operator, is_new, begin, done), name="dsext-builds", daemon=True
    )
    reporter.start()
    try:
        yield
    finally:
        done.set()
        reporter.join()
    if is_new or time.monotonic() - begin > FIRST_SECONDS:
        logger.info(
            f"DeepSpeed's operator {operator} is ready after {time.monotonic() - begin:.0f} s"
        )


def _report(operator: str, is_new: bool, begin: float, done: threading.Event) -> None:
    """Log progress every few seconds until `done`."""
    pause = FIRST_SECONDS
    doing = "still compiling" if is_new else "checking, and compiling again if it is out of date,"
    while not done.wait(pause):
        pause, took = EVERY_SECONDS, f"{time.monotonic() - begin:.0f} s"
        left = [lock for lock in build_locks.abandoned() if lock.parent.name == operator]
        if left:
            logger.warning(
                f"waiting for the lock {left[0]} for {took}: a killed build left it behind. "
                "Delete it to continue"
            )
        else:
            logger.info(f"{doing} DeepSpeed's operator {operator}: {took}")
