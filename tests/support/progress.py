"""Reports during a long wait that it continues."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Progress"]

LIFE_SECONDS = 5.0


class Progress:
    """A silent wait; call `look` repeatedly during it.

    Args:
        what: describes what is waited for.
        tell: called with a line every `LIFE_SECONDS`.
    """

    def __init__(self, what: Callable[[], str], tell: Callable[[str], object]) -> None:
        self._what, self._tell = what, tell
        self._begin = self._told = time.monotonic()

    def look(self) -> None:
        """Report that the wait continues, if it is time to."""
        if (now := time.monotonic()) - self._told >= LIFE_SECONDS:
            self._told = now
            self._tell(f"{self._what()} ... {now - self._begin:.0f} s")
