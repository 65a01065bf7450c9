"""Decides which numbers of cores the tuner measures, when it stops, and which number it chooses.

Memory bandwidth limits CPU Adam: it gets faster with more cores until a node's bandwidth is used
up. The choice is the smallest number of cores within 3 % of the best bandwidth; PyTorch makes
better use of any further core.
"""

import random
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

__all__ = [
    "Point",
    "Sweep",
    "choose",
    "ladder",
    "relative_spread",
    "training_choice",
    "NOISY_SPREAD",
]

SATURATED_FRACTION = 0.97
NOISY_SPREAD = 0.10
# Fewer optimizer cores are chosen only if they make PyTorch faster by at least this fraction.
WORTHWHILE_FRACTION = 0.03
REMEASURED_POINTS = 3


@dataclass(frozen=True)
class Point:
    """One number of optimizer cores, measured on all ranks at once."""

    cores: int
    step_seconds: float | None
    """Median step time of the slowest rank; None if the measurement failed."""
    spread: float
    """Interquartile range divided by median, for that rank."""
    gb_per_s: float
    """Memory traffic of the slowest rank, in 1e9 bytes per second; 0 if the measurement failed."""
    noise: str = ""
    """Why the point is doubtful; empty if it is not."""


def ladder(maximum: int) -> list[int]:
    """Return 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, ... up to and including ``maximum``."""
    steps = {1, 2, 3, 4, maximum}
    power = 4
    while power < maximum:
        steps |= {power, power * 3 // 2}
        power *= 2
    return sorted(step for step in steps if step <= maximum)


def relative_spread(seconds: Iterable[float]) -> float:
    """Return the interquartile range divided by the median, for at least two values."""
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return (high - low) / middle if middle > 0 else 0.0


def choose(points: Iterable[Point], hidden_seconds: float | None = None) -> int:
    """Choose the smallest number of cores within 3 % of the best bandwidth.

    Args:
        points: the measurements, at least one.
        hidden_seconds: time that the accelerator leaves the optimizer for one step. Fewer cores are
            chosen if the step still fits into it.
    """
    by_cores = sorted(points, key=lambda point: point.cores)
    best = max(point.gb_per_s for point in by_cores)
    chosen = next(point.cores for point in by_cores if point.gb_per_s >= SATURATED_FRACTION * best)
    if hidden_seconds is not None:
        hiding = [
            point.cores
            for point in by_cores
            if point.step_seconds is not None and point.step_seconds <= hidden_seconds
        ]
        chosen = min([chosen, *hiding])
    return chosen


def training_choice(slowdowns: dict[int, float]) -> int:
    """Choose the largest number of optimizer cores measured, unless fewer make PyTorch faster by
    over 3 %.

    Args:
        slowdowns: optimizer cores -> slowdown of PyTorch as a fraction.
    """
    chosen = max(slowdowns)
    for cores in sorted(slowdowns, reverse=True):
        if slowdowns[cores] < slowdowns[chosen] - WORTHWHILE_FRACTION:
            chosen = cores
    return chosen


class Sweep:
    """Measures rising numbers of cores until more gain nothing, narrows the choice down, and
    repeats the best.

    Args:
        maximum: maximum number of optimizer cores per rank.
        measure: measures one number of cores.
        out_of_time: called before each further measurement; True ends the sweep.
    """

    def __init__(
        self,
        maximum: int,
        measure: Callable[[int], Point],
        out_of_time: Callable[[], bool] = lambda: False,
    ) -> None:
        self.maximum = maximum
        self._measure = measure
        self._out_of_time = out_of_time
        self._points: dict[int, Point] = {}

    @property
    def points(self) -> list[Point]:
        """All points so far, by rising number of cores."""
        return [self._points[cores] for cores in sorted(self._points)]

    def run(self) -> list[Point]:
        """Measure what is needed, and return all points by rising number of cores."""
        for cores in ladder(self.maximum):
            if self._points and (self._saturated() or self._out_of_time()):
                break
            self._points[cores] = self._measure(cores)
        self._look_around_the_best()
        self._bisect()
        self._look_again()
        return self.points

    def _saturated(self) -> bool:
        """Whether two larger numbers of cores gained nothing over the chosen one."""
        return sum(point.cores > choose(self.points) for point in self.points) >= 2

    def _look_around_the_best(self) -> None:
        """Halve the gaps between the best point and its neighbours, as long as the best
        improves."""
        best = None
        while (
            not self._out_of_time()
            and (now := max(self.points, key=lambda point: point.gb_per_s)) != best
        ):
            best = now
            below = max((cores for cores in self._points if cores < best.cores), default=best.cores)
            above = min((cores for cores in self._points if cores > best.cores), default=best.cores)
            for middle in ((below + best.cores) // 2, (best.cores + above) // 2):
                if middle not in self._points:
                    self._points[middle] = self._measure(middle)

    def _bisect(self) -> None:
        """Narrow the gap between the chosen number and the largest one that was too slow."""
        while not self._out_of_time():
            chosen = choose(self.points)
            rejected = max((cores for cores in self._points if cores < chosen), default=chosen)
            if chosen - rejected < 2:
                return
            middle = (chosen + rejected) // 2
            self._points[middle] = self._measure(middle)

    def _look_again(self) -> None:
        """Measure the best points again, in random order, and keep the faster result: noise only
        slows a step down."""
        best = sorted(self.points, key=lambda point: -point.gb_per_s)[:REMEASURED_POINTS]
        for point in random.sample(best, len(best)):
            if self._out_of_time():
                return
            again = self._measure(point.cores)
            if again.gb_per_s > point.gb_per_s:
                self._points[point.cores] = again
            elif point.noise and not again.noise:
                self._points[point.cores] = replace(point, noise="")
