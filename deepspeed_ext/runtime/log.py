"""The package's logger, and functions that log a message only once.

The environment variable ``DSEXT_LOG_LEVEL`` sets the level, by a standard ``logging`` name; default
INFO.
"""

import logging
import os
import sys

from deepspeed_ext.runtime.words import quoted

logger = logging.getLogger("deepspeed_ext")

_logged: set[str] = set()


def _configure() -> None:
    if logger.handlers:
        return
    handler = logging.StreamHandler(stream=sys.stderr)
    handler.setFormatter(
        logging.Formatter("[%(asctime)s] [%(levelname)s] [deepspeed_ext] %(message)s")
    )
    logger.addHandler(handler)
    level = os.environ.get("DSEXT_LOG_LEVEL") or "INFO"
    known = logging.getLevelName(level.upper())
    logger.setLevel(known if isinstance(known, int) else logging.INFO)
    logger.propagate = False
    if not isinstance(known, int):
        logger.warning(
            "DSEXT_LOG_LEVEL must be DEBUG, INFO, WARNING or ERROR, "
            f"got {quoted(level)}; it counts as INFO"
        )


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


_configure()
