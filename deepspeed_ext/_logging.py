"""The package's logger, and how to say a thing once.

Level: environment variable ``DSEXT_LOG_LEVEL`` (a name of the standard ``logging`` levels, default INFO).
"""

import logging
import os
import sys

logger = logging.getLogger("deepspeed_ext")

_said: set[str] = set()


def _configure() -> None:
    if logger.handlers:
        return
    handler = logging.StreamHandler(stream=sys.stderr)
    handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] [deepspeed_ext] %(message)s"))
    logger.addHandler(handler)
    level = os.environ.get("DSEXT_LOG_LEVEL", "INFO").upper()
    known = logging.getLevelName(level)
    logger.setLevel(known if isinstance(known, int) else logging.INFO)
    logger.propagate = False


def log_once(level: int, message: str) -> None:
    """Log ``message`` at ``level`` unless this process has logged the very same text before."""
    if message not in _said:
        _said.add(message)
        logger.log(level, message)


def warn_once(message: str) -> None:
    """Warn with ``message`` unless this process has done so before."""
    log_once(logging.WARNING, message)


_configure()
