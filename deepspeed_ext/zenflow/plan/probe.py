"""Finds how many threads the optimizer process passes fastest with: the passes of training steps
are the probe, because their results do not depend on it. Plain values."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

__all__ = ["PROBED_STEPS", "ThreadProbe", "thread_counts"]

PROBED_STEPS = 6
"""Divided among the counts of threads."""

_NEAR = 0.03
"""Fewer threads must be faster by so much."""


def thread_counts(most: int) -> tuple[int, ...]:
    """The counts of threads to try, at most three, the largest first."""
    return tuple(dict.fromkeys(max(1, count) for count in (most, most * 3 // 4, most // 2)))


class ThreadProbe:
    """Says which count of threads comes next, and which was best.

    Args:
        counts: of threads, the one to prefer first; at most half of `PROBED_STEPS`, or one.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        each = PROBED_STEPS // len(counts)
        self._coming = [count for count in counts for _ in range(each)]
        self._seconds: dict[int, list[float]] = {count: [] for count in counts}
        self._noted = 0

    @property
    def coming(self) -> int:
        """Threads of the coming step's pass."""
        return self._coming[min(self._noted, len(self._coming) - 1)]

    @property
    def is_over(self) -> bool:
        return self._noted >= len(self._coming)

    def note(self, seconds: float) -> None:
        """Record the newest pass that has ended, in a step that began with `coming`."""
        self._seconds[self.coming].append(seconds)
        self._noted += 1

    def seconds(self, count: int) -> float:
        """Of a pass on `count` threads. The first is left out: if steps overlap, it may be the pass
        of the step before, or a part of it."""
        noted = self._seconds[count]
        return statistics.median(noted[1:] or noted)

    @property
    def best(self) -> int:
        """The fastest count; an earlier one, unless a later one is clearly faster."""
        best, *others = self._seconds
        for count in others:
            if self.seconds(count) < (1.0 - _NEAR) * self.seconds(best):
                best = count
        return best
