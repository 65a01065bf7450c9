"""Finds the thread count with which the optimizer process is fastest, by timing the passes of
training steps, whose results do not depend on it. Plain values."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

__all__ = ["PROBED_STEPS", "ThreadProbe", "thread_counts"]

PROBED_STEPS = 6
"""Number of probed steps, divided among the thread counts."""

_NEAR = 0.03
"""Fraction by which fewer threads must be faster."""


def thread_counts(most: int) -> tuple[int, ...]:
    """The thread counts to try, at most three, the largest first."""
    return tuple(dict.fromkeys(max(1, count) for count in (most, most * 3 // 4, most // 2)))


class ThreadProbe:
    """Says which thread count comes next, and which was best.

    Args:
        counts: thread counts, the preferred one first; at most half as many as `PROBED_STEPS`.
        overlaps: whether steps overlap, so that the newest pass may belong to the step before.

    Attributes:
        noted: the seconds that were recorded, in order.
    """

    def __init__(self, counts: Sequence[int], *, overlaps: bool) -> None:
        self._left_out = int(overlaps)
        each = PROBED_STEPS // len(counts)
        self._coming = [count for count in counts for _ in range(each)]
        self._seconds: dict[int, list[float]] = {count: [] for count in counts}
        self.noted: list[float] = []

    @property
    def coming(self) -> int:
        """Thread count of the coming step's pass."""
        return self._coming[min(len(self.noted), len(self._coming) - 1)]

    @property
    def is_over(self) -> bool:
        return len(self.noted) >= len(self._coming)

    def note(self, seconds: float) -> None:
        """Record the duration of the newest finished pass, in a step that began with `coming`."""
        self._seconds[self.coming].append(seconds)
        self.noted.append(seconds)

    def seconds(self, count: int) -> float:
        """Median pass time with `count` threads. If steps overlap, the first is left out."""
        noted = self._seconds[count]
        return statistics.median(noted[self._left_out :] or noted)

    @property
    def best(self) -> int:
        """The best count: the first, unless a later one is clearly faster."""
        best, *others = self._seconds
        for count in others:
            if self.seconds(count) < (1.0 - _NEAR) * self.seconds(best):
                best = count
        return best
