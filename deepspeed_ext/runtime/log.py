"""The package's logger, messages that are logged only once, and the words of messages.

The environment variable ``DSEXT_LOG_LEVEL`` sets the level, by a standard ``logging`` name; default
INFO.
"""

from __future__ import annotations

import logging
import os
import sys

LOAD_ANOTHER = "load another checkpoint by its tag"
"""What to do if one cannot be loaded."""

logger = logging.getLogger("deepspeed_ext")

_logged: set[str] = set()


def counted(count: int, noun: str) -> str:
    """The number and the noun, "1 group" or "2 groups". `noun`: singular, with a plural in -s."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def quoted(text: str) -> str:
    """``text`` in quotes, as messages show what a user wrote: its first 40 characters."""
    return repr(text if len(text) <= 40 else f"{text[:40]}...")


def one_line(error: BaseException) -> str:
    """The type and the text of an error, if it has one."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def log_once(level: int, message: str) -> None:
    """Log ``message`` at ``level``, unless this process has logged the same text before."""
    if message not in _logged:
        _logged.add(message)
        logger.log(level, message)


def warn_once(message: str) -> None:
    """Log ``message`` as a warning, unless this process has logged the same text before."""
    log_once(logging.WARNING, message)


def is_off(variable: str) -> bool:
    """Whether the variable is 0. A value other than 0 and 1 counts as 1, with a warning."""
    value = os.environ.get(variable, "") or "1"
    if value not in ("0", "1"):
        warn_once(f"{variable} must be 0 or 1, got {quoted(value)}; it counts as 1")
    return value == "0"


def _configure() -> None:
    handler = logging.StreamHandler(stream=sys.stderr)
    handler.setFormatter(
        logging.Formatter("[%(asctime)s] [%(levelname)s] [deepspeed_ext] %(message)s")
    )
    logger.addHandler(handler)
    logger.propagate = False
    level = os.environ.get("DSEXT_LOG_LEVEL") or "INFO"
    known = logging.getLevelName(level.upper())
    logger.setLevel(known if isinstance(known, int) else logging.INFO)
    if not isinstance(known, int):
        logger.warning(
            "DSEXT_LOG_LEVEL must be DEBUG, INFO, WARNING or ERROR, "
            f"got {quoted(level)}; it counts as INFO"
        )


if not logger.handlers:
    _configure()
