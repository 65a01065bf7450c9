"""What the package logs, for tests."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from deepspeed_ext.runtime.log import logger

__all__ = ["heard"]


@contextmanager
def heard(about: str = "") -> Iterator[list[tuple[str, str]]]:
    """Level and message of what is logged meanwhile on this rank, if the message has the text
    `about`."""
    found: list[tuple[str, str]] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if about in record.getMessage():
                found.append((record.levelname, record.getMessage()))

    ear = Ear()
    logger.addHandler(ear)
    try:
        yield found
    finally:
        logger.removeHandler(ear)
